"""The trainer receives its keeper's commands, and does not outlive it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.protocol.attempt import CONTROL_FD_ENV
from engine.protocol.exit_codes import TrainerExit

READS = (
    "import time\n"
    "from engine.training.control import Control\n"
    "control = Control()\n"
    "print('up', flush=True)\n"
    "while not control.stop_requested: time.sleep(0.01)\n"
    "print('stopping', flush=True)\n"
    "time.sleep(60)\n"
)


def test_a_stop_is_received_and_the_end_of_the_keeper_ends_the_trainer() -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", READS],
        env={**os.environ, CONTROL_FD_ENV: str(read_end)},
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
    ) as trainer:
        os.close(read_end)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        os.write(write_end, b"st")
        os.write(write_end, b"op\n")
        assert trainer.stdout.readline() == b"stopping\n"
        assert trainer.poll() is None
        os.close(write_end)
        assert trainer.wait(20) == TrainerExit.KEEPER_GONE


WAITS = (
    "import os, time\n"
    "from engine.training.control import Control\n"
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
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", WAITS.format(set_up=set_up)],
        env={**os.environ, CONTROL_FD_ENV: str(read_end)},
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
    ) as trainer:
        os.close(read_end)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        os.write(write_end, b"unknown\nemergency_")
        os.write(write_end, b"checkpoint\n")
        assert trainer.wait(20) == TrainerExit.PEER_LOST
        assert trainer.stdout.read() == output
        os.close(write_end)
