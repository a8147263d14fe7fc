"""The trainer receives its keeper's commands, and does not outlive it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from engine.protocol.attempt import CONTROL_FD_ENV
from engine.protocol.exit_codes import TrainerExit

READS = (
    "import time\n"
    "from engine.training.process import Control\n"
    "control = Control()\n"
    "print('up', flush=True)\n"
    "while not control.stop.is_set(): time.sleep(0.01)\n"
    "print('stopping', flush=True)\n"
    "time.sleep(60)\n"
)


@contextlib.contextmanager
def started(program: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], int]]:
    """The process of a program that has printed "up", its output, and the end of its control pipe to write to."""
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, CONTROL_FD_ENV: str(read_end)},
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
    ) as process:
        os.close(read_end)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process, process.stdout, write_end


def test_a_stop_is_received_and_the_end_of_the_keeper_ends_the_trainer() -> None:
    with started(READS) as (trainer, printed, write_end):
        os.write(write_end, b"st")
        os.write(write_end, b"op\n")
        assert printed.readline() == b"stopping\n"
        assert trainer.poll() is None
        os.close(write_end)
        assert trainer.wait(20) == TrainerExit.KEEPER_GONE


WAITS = (
    "import os, time\n"
    "from engine.training.process import Control\n"
    "control = Control()\n"
    "{set_up}"
    "print('up', flush=True)\n"
    "time.sleep(60)\n"
)
SAVES = "control.save_and_exit = lambda code: (print('saved', flush=True), os._exit(code))\n"


@pytest.mark.parametrize(("set_up", "output"), [("", b""), (SAVES, b"saved\n")], ids=["no state yet", "with a state"])
def test_on_an_emergency_checkpoint_the_trainer_exits_although_its_main_thread_hangs(
    set_up: str, output: bytes
) -> None:
    with started(WAITS.format(set_up=set_up)) as (trainer, printed, write_end):
        os.write(write_end, b"unknown\nemergency_")
        os.write(write_end, b"checkpoint\n")
        assert trainer.wait(20) == TrainerExit.PEER_LOST
        assert printed.read() == output
        os.close(write_end)
