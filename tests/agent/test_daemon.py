"""A detached keeper: the process that was started ends with what there is to say, and nothing of it holds the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from engine.node import processes
from engine.protocol.attempt import read_exit
from tests.agent.keeper_runner import WAIT, RunningKeeper, start_keeper
from tests.waiting import wait_until


def keep_detached(directory: Path, source: str, **fields: object) -> RunningKeeper:
    return start_keeper(
        directory, [sys.executable, "-u", "-c", source], spec_fields=fields or None, options=["--detach"]
    )


def ended(kept: RunningKeeper) -> None:
    wait_until(kept.files.exit(0).exists)
    kept.nothing_left()


def test_the_process_in_front_exits_with_0_when_the_identity_is_written(tmp_path: Path) -> None:
    kept = keep_detached(tmp_path, WAIT)
    assert kept.process.wait(20) == 0
    assert kept.files.identity(0).exists()
    identity = kept.identity()
    assert processes.alive(identity.keeper_pid, identity.keeper_start)
    assert os.getsid(identity.keeper_pid) != kept.process.pid
    kept.await_output(b"up")
    kept.say(b"end\n")
    ended(kept)
    record = read_exit(kept.files.exit(0))
    assert record is not None and (record.signal, record.stopped_by) == (signal.SIGTERM, "end")


def test_a_failed_start_is_the_exit_code_of_the_process_in_front(tmp_path: Path) -> None:
    kept = start_keeper(tmp_path, ["/nowhere/at/all"], options=["--detach"])
    assert kept.process.wait(20) == 127
    assert "cannot start" in kept.troubles()
    ended(kept)


def test_a_program_that_ends_at_once_was_started_all_the_same(tmp_path: Path) -> None:
    for number in range(5):
        kept = keep_detached(tmp_path / str(number), "raise SystemExit(3)")
        assert kept.process.wait(20) == 0
        ended(kept)
        record = read_exit(kept.files.exit(0))
        assert record is not None and record.code == 3


def test_the_rank_holds_no_pipe_of_its_launcher(tmp_path: Path) -> None:
    front = ["/bin/sh", "-c", 'exec "$@" 9>&1', "sh"]
    kept = start_keeper(
        tmp_path, [sys.executable, "-u", "-c", WAIT], options=["--detach"], prefix=front, stdout=subprocess.PIPE
    )
    assert kept.process.stdout is not None
    assert kept.process.stdout.read() == b"", "its end comes while the rank runs"
    kept.process.stdout.close()
    assert kept.process.wait(20) == 0
    kept.await_output(b"up")
    kept.say(b"end\n")
    ended(kept)


def test_the_rank_survives_a_killed_process_in_front(tmp_path: Path) -> None:
    kept = keep_detached(tmp_path, WAIT)
    wait_until(lambda: len(processes.with_nonce(kept.nonce)) > 1)
    kept.process.kill()
    kept.process.wait(20)
    kept.await_output(b"up")
    kept.say(b"end\n")
    ended(kept)


def test_the_program_does_not_outlive_a_killed_detached_keeper(tmp_path: Path) -> None:
    kept = keep_detached(tmp_path, WAIT)
    assert kept.process.wait(20) == 0
    kept.await_output(b"up")
    os.kill(kept.identity().keeper_pid, signal.SIGKILL)
    kept.nothing_left()


KEEPER_OF_TORCHRUN = """
import os, subprocess, sys, uuid
from engine.node.daemon import GroupReaper
mark = {"TEST_MARK": uuid.uuid4().hex}
def start(**more):
    wait = "print('up', flush=True); import time; time.sleep(60)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    program = subprocess.Popen([sys.executable, "-c", wait], start_new_session=True, **pipes, **more)
    program.stdout.readline()
    return program.pid
agent, worker, other = start(), start(env={**os.environ, **mark}), start()
reaper = GroupReaper(mark)
reaper.set_group(agent)
print(agent, worker, other, flush=True)
os._exit(0)
"""


def test_workers_in_sessions_of_their_own_do_not_outlive_their_keeper() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPER_OF_TORCHRUN], capture_output=True, text=True, check=True)
    agent, worker, other = map(int, done.stdout.split())
    try:
        wait_until(lambda: not any(map(processes.exists, (agent, worker))))
        assert processes.exists(other)
    finally:
        os.kill(other, signal.SIGKILL)
