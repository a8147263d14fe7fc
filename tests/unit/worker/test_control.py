"""The trainer hears its keeper, and does not outlive it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.worker.control import EXIT_KEEPER_GONE, EXIT_PEER_LOST
from engine.worker.wire import CONTROL_FD_ENV

LISTENS = (
    "import time\n"
    "from engine.worker.control import Control\n"
    "control = Control()\n"
    "print('up', flush=True)\n"
    "while not control.stop_asked: time.sleep(0.01)\n"
    "print('asked', flush=True)\n"
    "time.sleep(60)\n"
)


def test_a_stop_is_heard_and_the_end_of_the_keeper_ends_the_trainer() -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS],
        env={**os.environ, CONTROL_FD_ENV: str(read_end)},
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
    ) as trainer:
        os.close(read_end)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        os.write(write_end, b"st")
        os.write(write_end, b"op\n")
        assert trainer.stdout.readline() == b"asked\n"
        assert trainer.poll() is None
        os.close(write_end)
        assert trainer.wait(20) == EXIT_KEEPER_GONE


RESCUES = (
    "import os, time\n"
    "from engine.worker.control import Control\n"
    "control = Control()\n"
    "{set_up}"
    "print('up', flush=True)\n"
    "time.sleep(60)\n"
)
KEEPS = "control.on_rescue = lambda code: (print('rescued', flush=True), os._exit(code))\n"


@pytest.mark.parametrize(("set_up", "said"), [("", b""), (KEEPS, b"rescued\n")], ids=["no state yet", "with a state"])
def test_asked_for_a_rescue_the_trainer_leaves_although_its_main_thread_hangs(set_up: str, said: bytes) -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", RESCUES.format(set_up=set_up)],
        env={**os.environ, CONTROL_FD_ENV: str(read_end)},
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
    ) as trainer:
        os.close(read_end)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        os.write(write_end, b"beside\nresc")
        os.write(write_end, b"ue\n")
        assert trainer.wait(20) == EXIT_PEER_LOST
        assert trainer.stdout.read() == said
        os.close(write_end)
