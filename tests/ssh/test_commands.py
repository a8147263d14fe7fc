"""Commands on a node: what they are given arrives, what they say comes back, and they end with all their children."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest
from asyncssh.channel import SSHChannel, SSHClientChannel
from asyncssh.constants import MSG_CHANNEL_SUCCESS

from engine.errors import InputError, NodeUnreachable
from tests.ssh.bench import SshBench, Sshd, marked
from tests.waiting import until

HOSTILE = [
    "$(id)",
    "`id`",
    "a;id",
    "a'b\"c",
    "\\n\\",
    "!x",
    "-n",
    "",
    " ",
    "*",
    "~",
    "%s",
    "é\n\n",
    "\udcff",
    "a\tb",
    "#",
]
LEAVES_CHILDREN = "sleep 600 & (sleep 600; :) & sleep 600; :"


async def gone(sshd: Sshd, nonce: str) -> None:
    await until(lambda: not sshd.processes(FLIGHTDECK_NONCE=nonce))


async def test_streams_code_and_home(bench: SshBench) -> None:
    sshd = bench.sshd()
    script = 'cat; pwd; echo "$1"; echo err >&2; exit 3'
    done = await bench.to(sshd).run(["/bin/sh", "-c", script, "sh", "~/x"], timeout_s=10)
    assert done.stdout.decode().split("\n") == [f"{sshd.home}", f"{sshd.home}/x", ""]
    assert (done.code, done.stderr) == (3, b"err\n")


async def test_arguments_arrive_as_they_are(bench: SshBench) -> None:
    sshd = bench.sshd()
    program = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    done = await bench.to(sshd).run([sys.executable, "-c", program, *HOSTILE], timeout_s=10)
    expected = [argument.replace("~", str(sshd.home)) if argument == "~" else argument for argument in HOSTILE]
    assert done.stdout.split(b"\0") == [argument.encode(errors="surrogateescape") for argument in expected]


async def test_a_signal_is_a_negative_code(bench: SshBench) -> None:
    done = await bench.to(bench.sshd()).run(["/bin/sh", "-c", "kill -SEGV $$"], timeout_s=10)
    assert done.code == -11


async def test_what_is_not_there_is_an_oserror(bench: SshBench) -> None:
    transport = bench.to(bench.sshd())
    for argv in (["/no/python"], ["no-such-tool"], ["-n"]):
        with pytest.raises(FileNotFoundError):
            await transport.run(argv, timeout_s=10)
    with pytest.raises(FileNotFoundError):
        await transport.open(["/no/python"])
    with pytest.raises(InputError):
        await transport.run(["echo", "a\0b"], timeout_s=10)
    with pytest.raises(OSError, match="too long"):
        await transport.run(["echo", "x" * 200_000], timeout_s=10)
    assert (await transport.run(["echo", "x" * 100_000], timeout_s=10)).stdout == b"x" * 100_000 + b"\n"


async def test_noise_of_the_login_shell_is_passed_over(bench: SshBench) -> None:
    sshd = bench.sshd()
    (sshd.home / ".bashrc").write_text("printf 'Welcome! \\377 no newline'; echo warning >&2\n")
    done = await bench.to(sshd).run(["/bin/sh", "-c", "printf ok; printf bad >&2; exit 1"], timeout_s=10)
    assert (done.stdout, done.stderr) == (b"ok", b"bad")
    quiet = await bench.to(sshd).run(["/bin/sh", "-c", "echo why; exit 1"], timeout_s=10)
    assert quiet.exit_output == "why"


async def test_a_login_shell_that_runs_nothing(bench: SshBench) -> None:
    sshd = bench.sshd()
    (sshd.home / ".bashrc").write_text("echo 'This account is closed.' >&2; exit 7\n")
    with pytest.raises(NodeUnreachable) as raised:
        await bench.to(sshd).run(["true"], timeout_s=10)
    assert "This account is closed." in str(raised.value)
    assert (await bench.to(bench.sshd()).run(["true"], timeout_s=10)).code == 0


async def test_a_login_shell_cannot_steer_the_terminal_by_its_exit_output(bench: SshBench) -> None:
    sshd = bench.sshd()
    (sshd.home / ".bashrc").write_text("printf '\\033]0;owned\\007Closed.\\n' >&2; exit 7\n")
    with pytest.raises(NodeUnreachable) as raised:
        await bench.to(sshd).run(["true"], timeout_s=10)
    assert raised.value.why == "Closed."


async def test_a_program_that_never_stops_talking_is_ended(
    bench: SshBench, nonce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cluster.transport.ssh.channel._STDOUT_LIMIT", 1 << 20)
    sshd = bench.sshd()
    with pytest.raises(NodeUnreachable, match="env printed more than 1,048,576 bytes"):
        await bench.to(sshd).run(marked(nonce, "yes"), timeout_s=60)
    assert sshd.processes(FLIGHTDECK_NONCE=nonce) == []


async def test_the_time_limit_ends_the_program_and_all_its_children(bench: SshBench, nonce: str) -> None:
    sshd = bench.sshd()
    began = time.monotonic()
    done = await bench.to(sshd).run(marked(nonce, LEAVES_CHILDREN), timeout_s=0.3)
    assert done.code is None
    assert sshd.processes(FLIGHTDECK_NONCE=nonce) == []
    assert time.monotonic() - began < 60


async def test_a_program_deaf_to_signals_is_ended(bench: SshBench, nonce: str) -> None:
    sshd = bench.sshd()
    deaf = "trap '' HUP TERM INT; while :; do sleep 600; done"
    assert (await bench.to(sshd).run(marked(nonce, deaf), timeout_s=0.3)).code is None
    assert sshd.processes(FLIGHTDECK_NONCE=nonce) == []


async def test_a_cancelled_call_ends_the_program_and_all_its_children(bench: SshBench, nonce: str) -> None:
    sshd = bench.sshd()
    running = asyncio.create_task(bench.to(sshd).run(marked(nonce, LEAVES_CHILDREN), timeout_s=600))
    await until(lambda: len(sshd.processes(FLIGHTDECK_NONCE=nonce)) == 5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sshd.processes(FLIGHTDECK_NONCE=nonce) == []


async def test_a_call_cancelled_at_any_moment_of_its_start_leaves_nothing(bench: SshBench, nonce: str) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    await transport.run(["true"], timeout_s=10)
    for number in range(24):
        running = asyncio.create_task(transport.run(marked(nonce, "sleep 600; :"), timeout_s=600))
        await asyncio.sleep(number * 0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await gone(sshd, nonce)
    # What ended a program may have been a second connection, which is still being closed.
    await until(lambda: sshd.connections() == 1)


async def test_a_call_cancelled_while_it_connects_leaves_a_connection_that_can_be_used(bench: SshBench) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    for number in range(8):
        running = asyncio.create_task(transport.run(["sleep", "600"], timeout_s=600))
        await asyncio.sleep(number * 0.004)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (await transport.run(["true"], timeout_s=10)).code == 0
    await until(lambda: sshd.connections() == 1)


async def test_a_call_cancelled_while_it_connects_does_not_concern_who_waits_with_it(bench: SshBench) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    first, second = [asyncio.create_task(transport.run(["true"], timeout_s=10)) for _ in range(2)]
    await asyncio.sleep(0.004)
    first.cancel()
    assert (await second).code == 0
    with pytest.raises(asyncio.CancelledError):
        await first
    assert sshd.connections() == 1


async def test_a_transport_that_closes_while_it_connects_tells_who_waits(bench: SshBench) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    running = asyncio.create_task(transport.run(["true"], timeout_s=10))
    await asyncio.sleep(0)
    await transport.close()
    with pytest.raises(NodeUnreachable, match="closed here"):
        await running
    await until(lambda: not sshd.connections())


async def test_what_is_being_ended_is_ended_also_when_the_transport_closes(bench: SshBench, nonce: str) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    running = asyncio.create_task(transport.run(marked(nonce, "sleep 600; :"), timeout_s=600))
    await until(lambda: sshd.processes(FLIGHTDECK_NONCE=nonce))
    running.cancel()
    await asyncio.sleep(0)
    await transport.close()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sshd.processes(FLIGHTDECK_NONCE=nonce) == []


async def test_a_transport_that_closes_while_programs_start_leaves_no_connection(bench: SshBench) -> None:
    sshd = bench.sshd()
    for turns in range(1, 8):
        transport = bench.to(sshd)
        await transport.run(["true"], timeout_s=10)
        running = asyncio.create_task(transport.run(["true"], timeout_s=10))
        for _ in range(turns):
            await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(NodeUnreachable):
            await running
    await until(lambda: not sshd.connections())


async def test_a_connection_that_closes_as_a_session_is_granted_is_lost(
    bench: SshBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    handlers = vars(SSHChannel)["_packet_handlers"]
    granted = handlers[MSG_CHANNEL_SUCCESS]

    def close(channel: SSHClientChannel[bytes], *answer: Any) -> None:
        granted(channel, *answer)
        vars(type(channel.get_connection()))["_cleanup"](channel.get_connection(), None)

    monkeypatch.setitem(handlers, MSG_CHANNEL_SUCCESS, close)
    with pytest.raises(NodeUnreachable, match="connection lost"):
        await transport.run(["true"], timeout_s=10)
    await until(lambda: not sshd.connections())


async def test_many_commands_over_one_connection(bench: SshBench) -> None:
    sshd = bench.sshd(MaxSessions=40)
    transport = bench.to(sshd)
    done = await asyncio.gather(*(transport.run(["echo", str(n)], timeout_s=20) for n in range(40)))
    assert [int(one.stdout) for one in done] == list(range(40))
    assert sshd.connections() == 1


async def test_more_commands_at_once_than_a_connection_has_sessions(bench: SshBench) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    done = await asyncio.gather(*(transport.run(["echo", str(n)], timeout_s=20) for n in range(30)))
    assert [int(one.stdout) for one in done] == list(range(30))
    await until(lambda: sshd.connections() == 1)


async def test_commands_and_programs_that_stay_over_an_sshd_that_gives_one_session(bench: SshBench) -> None:
    sshd = bench.sshd(MaxSessions=1)
    transport = bench.to(sshd)
    (sshd.home / "file").write_bytes(b"there")
    channels = [await transport.open(["cat"]) for _ in range(2)]
    assert sshd.connections() == 2
    assert (await transport.run(["cat", "~/file"], timeout_s=10)).stdout == b"there"
    assert (await transport.run(["sleep", "60"], timeout_s=0.2)).code is None
    for channel in channels:
        assert await channel.close() == 0
    await until(lambda: sshd.connections() == 1)


async def test_an_sshd_that_gives_no_session_at_all(bench: SshBench) -> None:
    transport = bench.to(bench.sshd(MaxSessions=0))
    with pytest.raises(NodeUnreachable) as raised:
        await transport.run(["true"], timeout_s=10)
    assert "MaxSessions" in str(raised.value)


async def test_programs_that_stay_do_not_keep_commands_waiting(bench: SshBench) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    channels = [await transport.open(["cat"]) for _ in range(12)]
    assert sshd.connections() == 3, "an sshd gives ten sessions, and the two others have connections of their own"
    assert (await transport.run(["true"], timeout_s=10)).code == 0
    assert await asyncio.gather(*(channel.close() for channel in channels)) == [0] * 12
    await until(lambda: sshd.connections() == 1)


async def test_a_command_is_not_started_twice_when_its_connection_is_lost(bench: SshBench) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    script = ["/bin/sh", "-c", f"echo x >> {sshd.home}/started; sleep 600"]
    running = asyncio.create_task(transport.run(script, timeout_s=600))
    await until((sshd.home / "started").exists)
    sshd.drop_connections()
    with pytest.raises(NodeUnreachable) as raised:
        await running
    assert "connection lost" in str(raised.value)
    assert (await transport.run(["cat", "~/started"], timeout_s=10)).stdout == b"x\n"


async def test_a_connection_that_broke_is_opened_anew_by_the_next_call(bench: SshBench) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    for _ in range(3):
        channel = await transport.open(["cat"])
        sshd.drop_connections()
        done = await asyncio.gather(*(transport.run(["true"], timeout_s=10) for _ in range(5)))
        assert [one.code for one in done] == [0] * 5
        assert await channel.close() is None
