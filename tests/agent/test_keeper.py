"""The keeper, on real child processes: exits, signals, stops, the lease, processes left behind, and the log."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.node import processes
from engine.node.attempt_watch import WatchedRank
from engine.node.keeper import Lease
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END, STOP, AttemptSpec, heartbeat, lease_clock
from engine.protocol.exit_codes import TrainerExit
from tests.agent.keeper_runner import WAIT, RunningKeeper, start_keeper
from tests.needs import mounted_disk
from tests.waiting import wait_until

QUICK = {"stop_grace_s": 0.8, "term_grace_s": 0.3, "save_grace_s": 20.0}


def python(source: str) -> list[str]:
    return [sys.executable, "-u", "-c", source]


DEAF = "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nprint('up'); time.sleep(60)"

READS_STOP = """
import json, os, sys, time
print("up", flush=True)
while os.read(int(os.environ["FLIGHTDECK_CONTROL_FD"]), 5) != b"stop\\n": pass
"""


READS_EMERGENCY = """
import os, sys
print("up", flush=True)
while os.read(int(os.environ["FLIGHTDECK_CONTROL_FD"]), 100) != b"emergency_checkpoint\\n": pass
sys.exit(5)
"""


@pytest.mark.parametrize("code", [0, 3, 255])
def test_an_exit_code_is_recorded_and_passed_on(tmp_path: Path, code: int) -> None:
    kept = start_keeper(tmp_path, python(f"print('hello'); raise SystemExit({code})"))
    record = kept.ended()
    assert (record.code, record.signal, record.stopped_by, record.error) == (code, None, None, None)
    assert (record.rank, record.attempt, record.dropped_bytes) == (0, 1, 0)
    assert kept.process.returncode == code
    assert kept.output() == b"hello\n"


def test_the_program_may_open_more_files_than_a_login_on_a_mac(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        kept = start_keeper(tmp_path, python("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert kept.ended().code == 0
    assert int(kept.output()) == min(processes.OPEN_FILES, before[1] if before[1] > 0 else processes.OPEN_FILES)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_signal_that_ends_the_program_is_recorded_as_one(tmp_path: Path, number: signal.Signals) -> None:
    kept = start_keeper(tmp_path, python(f"import os; os.kill(os.getpid(), {int(number)})"))
    record = kept.ended()
    assert (record.code, record.signal, record.stopped_by) == (None, int(number), None)


def test_the_identity_names_the_programs_own_group(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(WAIT))
    identity = kept.identity()
    assert identity.keeper_pid == kept.process.pid
    assert identity.trainer_pgid == identity.trainer_pid == os.getpgid(identity.trainer_pid)
    assert os.getsid(identity.trainer_pid) == identity.trainer_pid
    assert processes.alive(identity.trainer_pid, identity.trainer_start)
    assert processes.alive(identity.keeper_pid, identity.keeper_start)
    assert identity.boot_id == processes.boot_id()
    kept.say(b"end\n")
    kept.ended()


@pytest.mark.parametrize(
    ("command", "named"), [(["/nowhere/at/all"], "/nowhere/at/all"), (["no-such-program-here"], "no-such-program-here")]
)
def test_a_program_that_does_not_exist_is_named(tmp_path: Path, command: list[str], named: str) -> None:
    record = start_keeper(tmp_path, command).ended()
    assert record.code == 127
    assert record.error is not None and named in record.error


def test_a_missing_working_directory_is_named(tmp_path: Path) -> None:
    record = start_keeper(tmp_path, python("pass"), workdir=tmp_path / "gone").ended()
    assert record.code == 127
    assert record.error is not None and str(tmp_path / "gone") in record.error


def test_a_spec_with_other_fields_is_refused_in_the_exit_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttemptSpec, "to_json", lambda spec: json.dumps({**asdict(spec), "unheard_of": 99}))
    record = start_keeper(tmp_path, python("pass")).ended()
    assert record.code == 127
    assert record.error is not None and "unheard_of" in record.error


def test_the_command_gets_this_nodes_python_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    shown = "import sys, os; print(sys.executable, sys.argv[1:], os.getcwd(), 'PYTHONPATH' in os.environ)"
    kept = start_keeper(tmp_path, ["python", "-c", shown, "{workdir}/x", "r{rank}"])
    assert kept.ended().code == 0
    assert kept.output().decode().split("\n")[0] == f"{sys.executable} ['{tmp_path}/x', 'r0'] {tmp_path} False"


def test_the_log_is_the_output_byte_for_byte_from_both_streams(tmp_path: Path) -> None:
    source = (
        "import os\n"
        "for i in range(3000): os.write(1 + i % 2, bytes(range(256)) * (1 + i % 40) + b'\\xff\\r\\x1b[31m%d' % i)"
    )
    kept = start_keeper(tmp_path, python(source))
    assert kept.ended().code == 0
    expected = b"".join(bytes(range(256)) * (1 + i % 40) + b"\xff\r\x1b[31m%d" % i for i in range(3000))
    assert kept.output() == expected


def test_stop_ends_a_command_by_term(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(WAIT), spec_fields={"stop_grace_s": 60.0})
    kept.await_output(b"up")
    kept.say(b"stop\n")
    record = kept.ended()
    assert (record.signal, record.stopped_by) == (signal.SIGTERM, "stop")
    assert kept.process.returncode == 128 + signal.SIGTERM


def test_a_program_that_ignores_term_is_killed(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(DEAF), spec_fields=QUICK)
    kept.await_output(b"up")
    started = time.monotonic()
    kept.say(b"end\n")
    record = kept.ended()
    assert (record.signal, record.stopped_by) == (signal.SIGKILL, "end")
    assert time.monotonic() - started < 30


@pytest.mark.needs("ps")
def test_a_suspended_program_is_killed(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(WAIT), spec_fields=QUICK)
    kept.await_output(b"up")
    suspended = kept.identity().trainer_pid
    os.kill(suspended, signal.SIGSTOP)
    status = ["ps", "-o", "stat=", "-p", str(suspended)]
    wait_until(lambda: subprocess.run(status, capture_output=True, check=True).stdout.startswith(b"T"))
    kept.say(b"stop\n")
    assert kept.ended().signal == signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_keeper_stops_the_rank(tmp_path: Path, number: signal.Signals) -> None:
    kept = start_keeper(tmp_path, python(WAIT), spec_fields=QUICK)
    kept.await_output(b"up")
    kept.process.send_signal(number)
    assert kept.ended().stopped_by == f"signal {number.name.removeprefix('SIG')}"


def test_a_stop_lets_the_trainer_exit_by_itself(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, None, trainer=READS_STOP + "print('left')", spec_fields={"stop_grace_s": 60.0})
    kept.await_output(b"up")
    kept.say(b"stop\n")
    record = kept.ended()
    assert (record.code, record.stopped_by) == (0, "stop")
    assert kept.output().endswith(b"left\n")


def test_a_trainer_that_does_not_exit_gets_term_after_the_grace(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, None, trainer=READS_STOP + "time.sleep(60)", spec_fields=QUICK)
    kept.await_output(b"up")
    kept.say(b"stop\n")
    record = kept.ended()
    assert (record.signal, record.stopped_by) == (signal.SIGTERM, "stop")


def test_a_trainer_that_is_saving_gets_the_longer_grace(tmp_path: Path) -> None:
    saving = """
def event(**fields):
    with open(os.environ["FLIGHTDECK_EVENTS"], "a") as file: file.write(json.dumps(fields) + "\\n")
event(event="phase", phase="saving"); event(event="checkpoint", phase="begin")
time.sleep(2.6)
event(event="checkpoint", phase="committed")
print("saved")
"""
    kept = start_keeper(tmp_path, None, trainer=READS_STOP + saving, spec_fields={**QUICK, "stop_grace_s": 2.0})
    kept.await_output(b"up")
    kept.say(b"stop\n")
    assert kept.ended().code == 0
    assert kept.output().endswith(b"saved\n")


def test_a_save_that_never_ends_gets_term_after_its_own_grace(tmp_path: Path) -> None:
    hung = """
with open(os.environ["FLIGHTDECK_EVENTS"], "a") as file: file.write('{"event": "phase", "phase": "saving"}\\n')
time.sleep(60)
"""
    kept = start_keeper(tmp_path, None, trainer=READS_STOP + hung, spec_fields={**QUICK, "save_grace_s": 1.0})
    kept.await_output(b"up")
    kept.say(b"stop\n")
    assert kept.ended().signal == signal.SIGTERM


def test_a_lease_without_heartbeats_ends_the_rank(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(WAIT), spec_fields={"lease_s": 0.5})
    record = kept.ended()
    assert (record.signal, record.stopped_by) == (signal.SIGTERM, "lease")


def test_heartbeats_renew_the_lease(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python("import time; time.sleep(3.3)"), spec_fields={"lease_s": 3.0})
    while kept.process.poll() is None:
        if kept.files.control(0).exists():
            kept.say(heartbeat(lease_clock()))
        time.sleep(0.05)
    assert (kept.ended().code, kept.ended().stopped_by) == (0, None)


def test_a_lease_can_be_configured_to_continue(tmp_path: Path) -> None:
    fields = {"lease_s": 0.2, "on_lease_expiry": "continue"}
    kept = start_keeper(tmp_path, python(WAIT), spec_fields=fields)
    wait_until(lambda: "no heartbeat from the head" in kept.troubles())
    kept.say(b"end\n")
    assert kept.ended().stopped_by == "end"


def test_a_suspended_keeper_reads_the_heartbeats_that_arrived_meanwhile(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(WAIT), spec_fields={"lease_s": 3.0})
    kept.await_output(b"up")
    kept.process.send_signal(signal.SIGSTOP)
    for _ in range(32):
        time.sleep(0.1)
        kept.say(heartbeat(lease_clock()))
    kept.process.send_signal(signal.SIGCONT)
    kept.say(b"end\n")
    assert kept.ended().stopped_by == "end"


def test_heartbeats_from_before_a_sleep_renew_no_lease_after_it(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(WAIT), spec_fields={"lease_s": 3.0})
    kept.await_output(b"up")
    kept.process.send_signal(signal.SIGSTOP)
    kept.say(heartbeat(lease_clock()))
    time.sleep(3.2)
    # Whoever is back first: the head may have gone on without this rank by now.
    kept.say(heartbeat(lease_clock()))
    kept.process.send_signal(signal.SIGCONT)
    assert kept.ended().stopped_by == "lease"


@pytest.mark.parametrize("trainer", [WAIT, None])
def test_a_rank_that_wakes_long_after_its_lease_is_killed_at_once(tmp_path: Path, trainer: str | None) -> None:
    command = None if trainer else python(WAIT)
    fields = {"lease_s": -3600.0, "stop_grace_s": 60.0, "save_grace_s": 60.0, "term_grace_s": 60.0}
    kept = start_keeper(tmp_path, command, trainer=trainer, spec_fields=fields)
    assert kept.ended().stopped_by == "lease"
    assert "KILL to the group" in kept.troubles()


@pytest.mark.parametrize(
    ("trainer", "ended"),
    [("import os; os.read(int(os.environ['FLIGHTDECK_CONTROL_FD']), 5)", (0, None)), (WAIT, (None, signal.SIGTERM))],
)
def test_a_trainer_that_wakes_soon_after_its_lease_has_the_rest_of_the_grace_and_no_more(
    tmp_path: Path, trainer: str, ended: tuple[int | None, int | None]
) -> None:
    rest_s = 20.0 if ended[1] is None else 0.3
    fields = {"lease_s": rest_s - 60.0, "stop_grace_s": 60.0, "save_grace_s": 60.0}
    record = start_keeper(tmp_path, None, trainer=trainer, spec_fields=fields).ended()
    assert (record.code, record.signal, record.stopped_by) == (*ended, "lease")


class Clock:
    """One that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_runs_out_once_and_time_asleep_counts() -> None:
    clock = Clock()
    lease = Lease(60.0, clock)
    clock.now += 59
    assert not lease.ran_out() and lease.left_s == 1
    clock.now += 3600
    assert lease.left_s < 0
    assert lease.ran_out() and not lease.ran_out()
    assert lease.ended_at == 160.0


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30)), max_size=30))
def test_a_lease_runs_out_exactly_when_its_heartbeats_are_too_far_apart(steps: list[tuple[float, float]]) -> None:
    """Steps: seconds to the next heartbeat, and for how long it then lies unread."""
    clock, begun = Clock(), 100.0
    lease = Lease(20.0, clock)
    sent = [begun]
    ran_out = False
    for apart_s, unread_s in steps:
        sent.append(sent[-1] + apart_s)
        clock.now = max(clock.now, sent[-1] + unread_s)
        ran_out |= lease.renew(sent[-1])
    assert ran_out == any(later - earlier > 20.0 for earlier, later in itertools.pairwise(sent))
    assert lease.left_s == pytest.approx(sent[-1] + 20.0 - clock.now)


def test_the_lease_clock_counts_sleep_wherever_this_runs() -> None:
    known = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC"}[sys.platform]
    before = time.clock_gettime(getattr(time, known))
    assert before <= lease_clock() <= time.clock_gettime(getattr(time, known))


def test_an_unknown_command_is_logged_and_ignored(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(WAIT))
    kept.await_output(b"up")
    kept.say(b"\xff\xfe go away\nen")
    kept.say(b"d\n")
    assert kept.ended().stopped_by == "end"
    assert "unknown command" in kept.troubles()


def test_a_child_left_in_the_group_is_killed_when_the_program_has_ended(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, ["/bin/sh", "-c", "sleep 60 & echo gone"])
    started = time.monotonic()
    assert kept.ended().code == 0
    assert kept.output() == b"gone\n"
    assert time.monotonic() - started < 30


def test_a_child_without_environment_in_a_group_of_its_own_is_killed(tmp_path: Path) -> None:
    source = "import subprocess; print(subprocess.Popen(['sleep', '60'], env={}, process_group=0).pid)"
    kept = start_keeper(tmp_path, python(source))
    assert kept.ended().code == 0
    child = int(kept.output())
    wait_until(lambda: processes.start_time(child) is None)


def test_a_double_forked_child_in_an_own_session_is_found_and_killed(tmp_path: Path) -> None:
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        print('far', os.getpid()); time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(0.3)\n"
    )
    started = time.monotonic()
    kept = start_keeper(tmp_path, python(source))
    assert kept.ended().code == 0
    assert kept.output().startswith(b"far ")
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("source", [WAIT, DEAF])
def test_the_program_does_not_outlive_a_killed_keeper(tmp_path: Path, source: str) -> None:
    kept = start_keeper(tmp_path, ["/bin/sh", "-c", 'sleep 60 & "$0" "$@"', *python(source)])
    kept.await_output(b"up")
    kept.process.kill()
    kept.process.wait()
    kept.nothing_left()


def test_a_killed_keepers_trainer_sees_the_end_of_its_control(tmp_path: Path) -> None:
    trainer = """
import os
print("up", flush=True)
ended = os.read(int(os.environ["FLIGHTDECK_CONTROL_FD"]), 5)
"""
    kept = start_keeper(tmp_path, None, trainer=trainer)
    kept.await_output(b"up")
    kept.process.kill()
    kept.process.wait()
    kept.nothing_left()


@pytest.mark.needs("tmpfs")
def test_a_full_disk_stops_neither_the_program_nor_its_exit_record(small_disk: Path) -> None:
    source = "import os\nfor i in range(400): os.write(1, b'x' * 10_000)\nprint('done')"
    kept = start_keeper(small_disk, python(source))
    record = kept.ended()
    assert record.code == 0
    assert record.dropped_bytes > 0
    assert record.log_bytes + record.dropped_bytes == 400 * 10_000 + len("done\n")
    assert kept.output() == b"x" * record.log_bytes


@pytest.mark.needs("tmpfs")
def test_when_space_returns_the_gap_is_marked(small_disk: Path) -> None:
    ballast, room = small_disk / "ballast", small_disk / "room"
    source = (
        "import os, sys, time\n"
        "for i in range(400): os.write(1, b'x' * 10_000)\n"
        f"os.close(os.open({str(small_disk / 'full')!r}, os.O_CREAT))\n"
        f"while not os.path.exists({str(room)!r}): time.sleep(0.01)\n"
        "print('after')\n"
    )
    ballast.write_bytes(b"b" * 500_000)
    kept = start_keeper(small_disk, python(source))
    wait_until((small_disk / "full").exists)
    wait_until(lambda: os.statvfs(small_disk).f_bavail == 0)
    ballast.unlink()
    # Its name is gone before its space is free.
    wait_until(lambda: shutil.disk_usage(small_disk).free > 250_000)
    room.touch()
    record = kept.ended()
    assert record.code == 0
    marker = f"\n[flightdeck] {record.dropped_bytes} bytes of output are missing here: disk full\n".encode()
    # What was still in the pipe may come after the gap.
    before, found, after = kept.output().partition(marker)
    assert found and after.endswith(b"after\n")
    kept_bytes = before + after.removesuffix(b"after\n")
    assert kept_bytes == b"x" * (400 * 10_000 - record.dropped_bytes)


def test_a_log_at_its_size_limit_counts_what_is_lost(tmp_path: Path) -> None:
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    source = "import os\nfor i in range(10): os.write(1, b'y' * 10_000)"
    kept = start_keeper(tmp_path, python(source), prefix=python(limited))
    record = kept.ended()
    assert (record.code, record.log_bytes, record.dropped_bytes) == (0, 50_000, 50_000)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB, more than the bundle and less than an output; the size-limit test covers machines
    that may not mount one."""
    with mounted_disk(tmp_path / "disk", "4000k") as disk:
        yield disk


def test_an_emergency_checkpoint_is_passed_to_the_trainer_and_is_not_a_stop(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, None, trainer=READS_EMERGENCY)
    kept.await_output(b"up")
    kept.say(EMERGENCY_CHECKPOINT)
    record = kept.ended()
    assert (record.code, record.stopped_by) == (5, None)


def test_an_emergency_checkpoint_ends_a_users_own_command(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, python(WAIT), spec_fields=QUICK)
    kept.await_output(b"up")
    kept.say(EMERGENCY_CHECKPOINT)
    record = kept.ended()
    assert (record.signal, record.stopped_by) == (signal.SIGTERM, "emergency_checkpoint")


STARTED = """
import json, os, signal, sys, time
from pathlib import Path
events, starts = Path(os.environ["FLIGHTDECK_EVENTS"]), Path("starts")
start = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(start))
print("start", start, flush=True)
def event(seq, **fields):
    with events.open("a") as file: file.write(json.dumps({"seq": seq, **fields}) + "\\n")
"""
"""A trainer that counts its starts."""

STEPPED = STARTED + "if start == 1: event(0, event='start'); event(1, event='step', iteration=1)\n"

LEAVES_ORPHAN = """
if start == 1:
    if os.fork() == 0:
        os.setsid()
        print("orphan", os.getpid(), flush=True)
        Path("orphaned").touch()
        signal.pause()
    while not Path("orphaned").exists(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start_rank_1(tmp_path: Path, trainer: str, restarts: int, **spec_fields: Any) -> RunningKeeper:
    source = STEPPED + trainer
    return start_keeper(tmp_path, None, trainer=source, rank=1, restarts=restarts, spec_fields=spec_fields)


def test_a_trainer_that_fails_is_started_again_after_its_remains_were_swept(tmp_path: Path) -> None:
    kept = start_rank_1(tmp_path, LEAVES_ORPHAN + "while not Path('go').exists(): time.sleep(0.01)", restarts=1)
    kept.await_output(b"orphan")
    first = kept.identity()
    kept.await_output(b"start 2")
    orphan = int(kept.output().split(b"orphan ")[1].split()[0])
    assert not processes.alive(orphan, processes.start_time(orphan) or "none")
    wait_until(lambda: kept.identity().trainer_pid != first.trainer_pid)
    second = kept.identity()
    assert processes.alive(second.trainer_pid, second.trainer_start)
    assert (second.keeper_pid, second.keeper_start) == (first.keeper_pid, first.keeper_start)
    (tmp_path / "bundle" / "go").touch()
    record = kept.ended()
    assert (record.code, record.signal, record.stopped_by) == (0, None, None)
    assert b"\n[flightdeck] the program ended (signal 9) and is started again\nstart 2\n" in kept.output()


def test_the_agent_kills_the_program_that_was_started_last(tmp_path: Path) -> None:
    kept = start_rank_1(tmp_path, "if start == 1: sys.exit(9)\nsignal.pause()", restarts=1)
    watched = WatchedRank(1, kept.files, kept.identity())
    kept.await_output(b"start 2")
    wait_until(lambda: watched.identity != kept.identity())
    watched.kill()
    assert kept.ended().signal == signal.SIGKILL


def test_a_trainer_is_started_again_only_so_often(tmp_path: Path) -> None:
    kept = start_rank_1(tmp_path, "sys.exit(9)", restarts=2)
    assert kept.ended().code == 9
    assert kept.process.returncode == 9
    assert [line for line in kept.output().decode().splitlines() if line.startswith("start")] == [
        "start 1",
        "start 2",
        "start 3",
    ]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(4)", TrainerExit.DIVERGED),
        ("event(0, event='start'); event(1, event='failure', error_type='JobError'); sys.exit(1)", 1),
    ],
)
def test_a_trainer_that_completed_or_would_fail_again_is_not_started_again(
    tmp_path: Path, ends: str, code: int
) -> None:
    kept = start_rank_1(tmp_path, ends, restarts=3)
    assert kept.ended().code == code
    assert kept.output() == b"start 1\n"


def test_a_trainer_that_fails_before_its_first_step_is_not_started_again(tmp_path: Path) -> None:
    source = STARTED + "event(0, event='start'); sys.exit(9)"
    kept = start_keeper(tmp_path, None, trainer=source, rank=1, restarts=3)
    assert (kept.ended().code, kept.output()) == (9, b"start 1\n")


def test_a_trainer_that_ran_for_long_begins_to_count_its_restarts_anew(tmp_path: Path) -> None:
    steady_at_once = "import sys; from engine.node import keeper; keeper.STEADY_S = 0.0; keeper.main(sys.argv[4:])"
    source = STEPPED + f"sys.exit({TrainerExit.PEER_LOST:d} if start < 3 else 0)"
    kept = start_keeper(tmp_path, None, trainer=source, rank=1, restarts=1, prefix=python(steady_at_once))
    assert kept.ended().code == 0
    assert kept.troubles().count("start 1 of 1") == 2


def test_a_save_of_the_program_before_gives_the_next_one_no_longer_grace(tmp_path: Path) -> None:
    source = "if start == 1: event(2, event='phase', phase='saving'); sys.exit(9)\nsignal.pause()"
    kept = start_rank_1(tmp_path, source, restarts=1, **{**QUICK, "save_grace_s": 60.0})
    kept.await_output(b"start 2")
    kept.say(STOP)
    assert kept.ended().signal == signal.SIGTERM


@pytest.mark.parametrize("command", [STOP, EMERGENCY_CHECKPOINT])
def test_a_trainer_that_was_asked_to_leave_is_not_started_again(tmp_path: Path, command: bytes) -> None:
    leaves = "os.read(int(os.environ['FLIGHTDECK_CONTROL_FD']), 100); sys.exit(5)"
    kept = start_rank_1(tmp_path, leaves, restarts=3, stop_grace_s=60.0)
    kept.await_output(b"start 1")
    kept.say(command)
    assert (kept.ended().code, kept.output()) == (5, b"start 1\n")


@pytest.mark.parametrize(
    ("command", "reason"),
    [(STOP, "stop"), (END, "end"), (EMERGENCY_CHECKPOINT, "emergency_checkpoint"), (signal.SIGTERM, "signal TERM")],
)
def test_a_rank_that_waits_to_be_started_again_ends_at_a_command(
    tmp_path: Path, command: bytes | signal.Signals, reason: str
) -> None:
    kept = start_rank_1(tmp_path, "sys.exit(9)", restarts=100)
    # The second wait is 2 s long.
    wait_until(lambda: "start 2 of 100" in kept.troubles())
    if isinstance(command, signal.Signals):
        kept.process.send_signal(command)
    else:
        kept.say(command)
    record = kept.ended()
    assert (record.code, record.stopped_by) == (9, reason)
    assert kept.output().count(b"is started again") < kept.troubles().count("the program ended")


def test_a_rank_that_waits_to_be_started_again_ends_with_its_lease(tmp_path: Path) -> None:
    kept = start_rank_1(tmp_path, "sys.exit(9)", restarts=100, lease_s=3.0)
    assert kept.ended().stopped_by == "lease"


def test_a_fenced_attempt_starts_no_program_again(tmp_path: Path) -> None:
    fences = "Path(os.environ['FLIGHTDECK_SPEC']).with_name('fenced').touch(); sys.exit(9)"
    kept = start_rank_1(tmp_path, fences, restarts=3)
    assert (kept.ended().code, kept.output()) == (9, b"start 1\n")


@pytest.mark.parametrize(
    ("local_ranks", "given", "threads"), [("1", None, b"None"), ("4", None, b"1"), ("4", "3", b"3")]
)
def test_pytorch_ranks_on_one_machine_have_a_thread_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_ranks: str, given: str | None, threads: bytes
) -> None:
    """As torchrun's workers have. What the job sets stays."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    show = ["python", "-c", "import os; print(os.environ.get('OMP_NUM_THREADS'))"]
    fields = {"as_torchrun": True, "env": {"OMP_NUM_THREADS": given} if given else {}}
    keeper = start_keeper(tmp_path, show, spec_fields=fields)
    keeper.ended()
    assert keeper.output().strip() == threads


def test_a_pytorch_command_has_the_variables_of_torchruns_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    show = [
        "python",
        "-c",
        f"import os; print(*[os.environ[name] for name in {names}], os.environ['TORCHELASTIC_RUN_ID'])",
    ]
    keeper = start_keeper(tmp_path, show, spec_fields={"as_torchrun": True})
    keeper.ended()
    assert keeper.output().split() == [b"0", b"False", b"default", b"3", b"8", b"run.1"]
