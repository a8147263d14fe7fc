"""The client of a host's agent: probes and commands with one outcome each, and what becomes of them when it ends."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio
from pydantic import ValidationError

from engine.cluster import agent_client, probe_results
from engine.cluster.agent_client import (
    AgentClient,
    AgentSession,
    InterpreterBroken,
    InterpreterMissing,
    SessionLimits,
    open_session,
)
from engine.cluster.probe_results import AddressProblems, ExampleCount, ModelConfiguration, ModelFiles, WorkdirTree
from engine.cluster.transport.base import Channel
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.errors import LaunchError, NodeUnreachable
from engine.models import Failed, FrozenModel, Late, Unparsable
from engine.node.processes import start_time
from tests.damage import stalled
from tests.unit.cluster.fake_agent import FakeNode
from tests.waiting import wait_until

MODEL: dict[str, Any] = {"kind": "llama", "bytes": 1, "shards": 1, "faults": [], "repository": None, "hashes": {}}


def test_texts_are_made_safe_and_short() -> None:
    hostile = "\x1b]0;title\x07model\u202egnp.\n" + "x" * 10_000
    output = probe_results.ModelFiles.model_validate(
        MODEL | {"kind": hostile, "hashes": {"a\x1b[2J.safetensors": "1 bytes"}}
    )
    assert output.kind.startswith("modelgnp.")
    assert len(output.kind) <= 300
    assert list(output.hashes) == ["a.safetensors"]


@pytest.mark.parametrize("name", ["org/tiny", "org-1/tiny.v2"])
def test_a_repository_is_taken_by_an_allow_list(name: str) -> None:
    assert probe_results.ModelFiles.model_validate(MODEL | {"repository": name}).repository == name


@pytest.mark.parametrize("name", ["--token/x", "a/b; id", "a/$(id)", "a/b/c", "../..", "a/b\n"])
def test_a_repository_that_would_be_more_than_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        probe_results.ModelFiles.model_validate(MODEL | {"repository": name})


@pytest.mark.parametrize("pid", [0, 1, -9, "7; id"])
def test_a_pid_that_must_not_be_killed_is_refused(pid: object) -> None:
    with pytest.raises(ValidationError):
        probe_results.PortHolders.model_validate({"ports": [{"holder": "x", "pid": pid}]})


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        (probe_results.AddressProblems, {"problems": [None] * 10_001}),
        (probe_results.ListeningPorts, {"listening": [70_000]}),
        (probe_results.StaleProcesses, {"stale": [{"pids": [], "command": "x"}]}),
        (probe_results.LeaseHeld, {"held": False}),
        (probe_results.ModelFiles, {}),
        (probe_results.ProgramLocation, {}),
    ],
)
def test_what_has_another_form_is_no_answer(kind: type[FrozenModel], output: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(output)


HERE = NodeConfig(name="here", python=sys.executable, workdir="/")


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[AgentClient]:
    agent = AgentClient(HERE, LocalTransport())
    yield agent
    await agent.aclose()


async def own_address(agent: AgentClient) -> object:
    return await agent.probe("addresses", "127.0.0.1", result_type=AddressProblems, timeout_s=20)


async def agent_pid(agent: AgentClient) -> int:
    return int((await agent.run(["/bin/sh", "-c", "echo $PPID"], timeout_s=20)).stdout)


async def test_probes_are_answered_in_whatever_order_they_end_by_one_agent(agent: AgentClient, tmp_path: Path) -> None:
    asked = [own_address(agent) for _ in range(10)]
    lacking = agent.probe("configuration", str(tmp_path), result_type=ModelConfiguration, timeout_s=20)
    *own, found = await asyncio.gather(*asked, lacking)
    assert own == [AddressProblems(problems=[None])] * 10
    assert isinstance(found, ModelConfiguration) and "config.json" in (found.problem or "")


async def test_a_probe_that_fails_says_how_and_harms_no_other(agent: AgentClient) -> None:
    failed, unknown, good = await asyncio.gather(
        agent.probe("model", result_type=ModelFiles, timeout_s=20),
        agent.probe("../keeper", result_type=ModelFiles, timeout_s=20),
        own_address(agent),
    )
    assert isinstance(failed, Failed) and (failed.exit_code, failed.stderr.startswith("TypeError")) == (1, True)
    assert unknown == Failed(command="the ../keeper probe", exit_code=2, stderr="there is no probe '../keeper'")
    assert good == AddressProblems(problems=[None])


async def test_a_probe_that_takes_too_long_is_ended_and_the_next_one_answered(
    agent: AgentClient, tmp_path: Path
) -> None:
    file = tmp_path / "train.jsonl"
    file.touch()
    with stalled(file):
        late = await agent.probe("examples", str(file), "{}", result_type=ExampleCount, timeout_s=0.5)
    assert late == Late(command="the examples probe", after_s=0.5)
    assert await own_address(agent) == AddressProblems(problems=[None])
    pid = await agent_pid(agent)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if children.exists():
        wait_until(lambda: children.read_text() == "", within_s=10)


@pytest.mark.parametrize("document", [[], {}, {"problems": "many"}, "\x1b[31mred"])
async def test_a_reply_of_another_form_is_no_value(document: object) -> None:
    agent = AgentClient(HERE, FakeNode(document))
    outcome = await own_address(agent)
    assert isinstance(outcome, Unparsable) and outcome.output.isprintable()
    await agent.aclose()


async def test_a_reply_without_end_does_not_fill_the_head(agent: AgentClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "_OUTPUT_LIMIT", 100_000)
    flood = await agent.run(["/bin/sh", "-c", "yes"], timeout_s=20.0)
    assert flood.code == 1 and "more than 100,000 bytes" in flood.exit_output
    assert (await agent.run(["echo", "next"], timeout_s=20.0)).stdout == b"next\n"


async def test_a_command_that_is_late_has_ended_when_that_is_reported(agent: AgentClient, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert (await agent.run(["/bin/sh", "-c", f"echo $$ > {pid}; sleep 600"], timeout_s=2.0)).code is None
    assert start_time(int(pid.read_text())) is None


async def test_a_folder_is_written_whole_and_for_its_user_alone(agent: AgentClient, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r" / "attempts" / "1"
    await agent.write(folder, {"spec.json": "{}", "rank0.in": None})
    assert (folder / "spec.json").read_text() == "{}" and (folder / "rank0.in").is_fifo()
    made = [folder / "spec.json", folder / "rank0.in", folder, folder.parent, tmp_path / "runs"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o600, 0o600, 0o700, 0o700, 0o700]
    with pytest.raises(OSError, match="is there already"):
        await agent.write(folder, {"other": ""})
    assert await agent.read_end(folder / "spec.json", 1) == b"}"
    assert await agent.read_end(folder / "other", 1) == b""


async def test_a_folder_that_cannot_be_written_whole_leaves_nothing(agent: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match="No such file or directory"):
        await agent.write(tmp_path / "there" / "runs", {"good": "", "no/such/folder": ""})
    assert list((tmp_path / "there").iterdir()) == []


async def test_a_command_that_goes_on_is_read_by_lines(agent: AgentClient, tmp_path: Path) -> None:
    request = await agent.start_command(["/bin/sh", "-c", "pwd; read word; echo $word"], directory=str(tmp_path))
    assert await request.next_line(20) == str(tmp_path).encode()
    request.close()


async def test_closing_leaves_nothing(agent: AgentClient) -> None:
    pid = await agent_pid(agent)
    running = asyncio.create_task(agent.run(["/bin/sleep", "600"], timeout_s=60))
    await own_address(agent)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    await agent.aclose()
    with pytest.raises(NodeUnreachable):
        await running
    for each in (pid, *map(int, children)):
        wait_until(lambda each=each: start_time(each) is None, within_s=10)  # type: ignore[misc]


async def test_when_the_agent_is_killed_all_who_wait_fail_and_the_next_request_starts_another(
    agent: AgentClient,
) -> None:
    pid = await agent_pid(agent)
    waiting = [asyncio.create_task(agent.run(["/bin/sleep", "600"], timeout_s=60)) for _ in range(2)]
    await own_address(agent)
    os.kill(pid, signal.SIGKILL)
    for each in waiting:
        with pytest.raises(NodeUnreachable, match="ended with -9"):
            await asyncio.wait_for(each, 20)
    assert await own_address(agent) == AddressProblems(problems=[None])
    assert await agent_pid(agent) != pid


def impatient(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    """From now on agents are opened with these limits."""
    opened = agent_client.open_session

    async def open_session(node: NodeConfig, transport: LocalTransport) -> AgentSession:
        return await opened(node, transport, SessionLimits(**limits))

    monkeypatch.setattr(agent_client, "open_session", open_session)


async def test_an_idle_agent_is_ended_and_the_next_request_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient(monkeypatch, heartbeat_interval_s=0.05, idle_s=0.2)
    agent = AgentClient(HERE, LocalTransport())
    session = await agent.session()
    await asyncio.wait_for(session.ended(), 20)
    assert session.why_ended == "it was idle"
    assert await own_address(agent) == AddressProblems(problems=[None])
    await agent.aclose()


async def test_a_request_in_the_moment_when_an_idle_agent_ends_is_another_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient(monkeypatch, heartbeat_interval_s=0.01, idle_s=0.1)
    agent = AgentClient(HERE, LocalTransport())
    session = await agent.session()
    while not session.ending:
        await asyncio.sleep(0)
    assert session.why_ended is None, "it is still being closed"
    asked = [asyncio.create_task(own_address(agent)) for _ in range(3)]
    assert await asyncio.gather(*asked) == [AddressProblems(problems=[None])] * 3
    assert session.why_ended == "it was idle"
    await agent.aclose()


class SlowLine(LocalTransport):
    """Programs start at once, and what they print comes `delay_s` later."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    async def open(self, argv: Sequence[str]) -> Channel:
        channel = await super().open(argv)
        read = channel.read

        async def read_late(size: int) -> bytes:
            await asyncio.sleep(self.delay_s)
            return await read(size)

        monkey = cast(Any, channel)
        monkey.read = read_late
        return channel


async def test_the_bundle_may_take_longer_than_the_connection() -> None:
    limits = SessionLimits(connect_s=1.2, start_s=20.0)
    session = await open_session(HERE, SlowLine(1.5), limits)
    await session.aclose()
    with pytest.raises(NodeUnreachable, match=r"0\.5 s are over"):
        await open_session(HERE, SlowLine(1.5), SessionLimits(start_s=0.5))


async def test_the_end_of_a_file_that_did_not_come_is_no_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = AgentClient(HERE, LocalTransport())
    (tmp_path / "file").write_text("one two")
    assert await agent.read_end(tmp_path / "file", 3) == b"two"
    assert await agent.read_end(tmp_path / "nothing", 3) == b""
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(agent_client, "_FILES_LIMIT_S", 0.2)
    with pytest.raises(LaunchError, match=r"could not be read.*0\.2 s are over"):
        await agent.read_end(tmp_path / "fifo", 3)
    await agent.aclose()


async def test_a_missing_interpreter_is_reported_to_each_caller() -> None:
    agent = AgentClient(HERE.model_copy(update={"python": "/no/such/python"}), LocalTransport())
    for _ in range(2):
        with pytest.raises(InterpreterMissing, match="/no/such/python cannot be run on here: No such file"):
            await own_address(agent)
    await agent.aclose()


STARTED = """echo '{"kind": "bootstrap", "home": "/home/ana"}'"""


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("exit 134", InterpreterBroken),
        ("exit 1", InterpreterBroken),
        ("exit 126", InterpreterBroken),
        ("exit 127", InterpreterMissing),
        ("exit 0", LaunchError),
        ("kill -KILL $$", LaunchError),
        ("exit 137", LaunchError),
        (f"{STARTED}; exit 1", LaunchError),
    ],
)
async def test_only_an_interpreter_that_ends_by_itself_before_the_bootstrap_is_broken(
    tmp_path: Path, body: str, kind: type[LaunchError]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o700)
    with pytest.raises(LaunchError) as raised:
        await open_session(HERE.model_copy(update={"python": str(python)}), LocalTransport())
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EACCES, InterpreterBroken), (errno.ENOEXEC, InterpreterBroken), (errno.ENOENT, InterpreterMissing)]
    + [(code, LaunchError) for code in (errno.EMFILE, errno.EAGAIN, errno.ENOMEM)],
)
async def test_a_head_that_cannot_start_a_process_does_not_blame_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[LaunchError]
) -> None:
    monkeypatch.setattr(LocalTransport, "open", AsyncMock(side_effect=OSError(code, os.strerror(code))))
    with pytest.raises(LaunchError, match=os.strerror(code)) as raised:
        await open_session(HERE, LocalTransport())
    assert type(raised.value) is kind and bool(raised.value.todo) is (kind is not LaunchError)


async def test_a_round_trip_is_measured_over_the_open_connection_and_none_here() -> None:
    elsewhere = AgentClient(HERE.model_copy(update={"ssh": "elsewhere"}), LocalTransport())
    for _ in range(2):
        taken = await elsewhere.round_trip_s()
        assert taken is not None and 0 < taken < 20
    await elsewhere.aclose()
    assert await AgentClient(HERE, LocalTransport()).round_trip_s() is None


async def test_a_round_trip_that_does_not_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()
    agent = AgentClient(HERE.model_copy(update={"ssh": "elsewhere"}), node)
    assert await agent.round_trip_s()
    node.channels[0].acknowledges = False
    monkeypatch.setattr(agent_client, "_ANSWER_S", 0.1)
    with pytest.raises(NodeUnreachable, match=r"does not answer: no answer within 0\.1 s"):
        await agent.round_trip_s()
    monkeypatch.setattr(agent_client, "_ANSWER_S", 10.0)
    waiting = asyncio.create_task(agent.round_trip_s())
    await asyncio.sleep(0)
    node.channels[0].end()
    with pytest.raises(NodeUnreachable):
        await waiting
    await agent.aclose()


async def test_an_agent_is_not_idle_while_a_round_trip_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch, heartbeat_interval_s=0.01, idle_s=10.0)
    node = FakeNode()
    agent = AgentClient(HERE.model_copy(update={"ssh": "elsewhere"}), node)
    session = await agent.session()
    node.channels[0].acknowledges = False
    session._idle_since -= 20
    measuring = asyncio.create_task(agent.round_trip_s())
    while len(session.heartbeats.sent_at) < 4 and not session.ending:
        await asyncio.sleep(0)
    assert not session.ending
    await agent.aclose()
    with pytest.raises(NodeUnreachable):
        await measuring


async def test_one_name_that_is_not_utf_8_makes_no_reply_unreadable() -> None:
    entries = {name: [size, None] for size, name in enumerate(("good", "a\udcff", "a\udcfe"))}
    agent = AgentClient(HERE, FakeNode({"entries": entries, "left": [], "permit": "/b\udcff"}))
    tree = await agent.probe("tree", result_type=WorkdirTree, timeout_s=20)
    assert isinstance(tree, WorkdirTree) and tree.permit == r"/b\udcff"
    assert tree.entries == {"good": (0, None), r"a\udcff": (1, None), r"a\udcfe": (2, None)}
    await agent.aclose()


async def test_output_of_a_login_shell_before_the_bootstrap_is_skipped() -> None:
    banner = b'Welcome!\n{"kind": "motd"}\n[\n'
    agent = AgentClient(HERE, FakeNode({"problems": [None]}, banner=banner))
    assert await own_address(agent) == AddressProblems(problems=[None])
    await agent.aclose()


async def test_an_agent_runs_from_memory_where_the_disk_takes_no_bundle(
    home: Path, monkeypatch: pytest.MonkeyPatch, agent: AgentClient
) -> None:
    """And reports why, so that nothing is launched there."""
    (home / "node").mkdir(parents=True)
    (home / "node" / "bundles").write_text("in the way")
    assert await own_address(agent) == AddressProblems(problems=[None])
    staged = (await agent.session()).home
    assert staged.staging_problem is not None and staged.staging_path == str(home / "node" / "bundles")


async def test_an_agent_in_memory_finds_the_packages_that_a_rank_would(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On PYTHONPATH, and those that the user has installed."""
    (home / "node").mkdir(parents=True)
    (home / "node" / "bundles").write_text("in the way")
    (tmp_path / "path" / "mlx_lm").mkdir(parents=True)
    (tmp_path / "path" / "mlx_lm" / "__init__.py").write_text("__version__ = '0.99.1'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    agent = AgentClient(HERE, LocalTransport())
    found = await agent.probe("mlx_lm", "import", "mlx_lm", result_type=probe_results.PackagesReport, timeout_s=30)
    assert isinstance(found, probe_results.PackagesReport) and found.versions == {"mlx_lm": "0.99.1"}
    await agent.aclose()


@pytest.mark.parametrize("home", ["../../..", "/Users/../etc", "/a\nb\x1b[2J", "", None, 7, ["/Users/ana"]])
async def test_a_node_that_lies_about_its_home_is_refused(home: object) -> None:
    node = FakeNode()
    node.home = home
    agent = AgentClient(HERE, node)
    with pytest.raises(LaunchError, match="the home on here cannot be used") as raised:
        await own_address(agent)
    assert str(raised.value).isprintable()
    await agent.aclose()
