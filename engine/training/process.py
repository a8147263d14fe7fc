"""One rank's training process, started by the keeper with all it needs in its environment; the keeper's commands to it,
and the detection of the keeper's own end. Exit codes: TrainerExit."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.node.processes import raise_priority
from engine.protocol.attempt import CONTROL_FD_ENV, EMERGENCY_CHECKPOINT, EVENTS_ENV, SPEC_ENV, STOP, AttemptSpec
from engine.protocol.events import EventWriter
from engine.protocol.exit_codes import TrainerError, TrainerExit
from engine.protocol.job import JobError
from engine.training.reporting import Reporter


class Control:
    """The keeper's commands: stop; save an emergency checkpoint and exit. Read in a thread of its own, so that one is
    received in the middle of a step."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.save_and_exit: Callable[[int], object] = os._exit
        """Called in the reading thread with the exit code; until there is a state to save, it only exits."""
        descriptor = os.environ.get(CONTROL_FD_ENV)
        if descriptor is not None:
            threading.Thread(target=self._read, args=(int(descriptor),), name="control", daemon=True).start()

    def _read(self, descriptor: int) -> None:
        received = b""
        while chunk := os.read(descriptor, 4096):
            received += chunk
            *commands, received = received.split(b"\n")
            for command in commands:
                if command + b"\n" == STOP:
                    self.stop.set()
                elif command + b"\n" == EMERGENCY_CHECKPOINT:
                    self.save_and_exit(TrainerExit.PEER_LOST)
        # Without its keeper the rank has no lease, no log and no exit record.
        os._exit(TrainerExit.KEEPER_GONE)


@dataclass(frozen=True)
class TrainingProcess:
    spec: AttemptSpec
    home: Path
    """The run's folder on the node."""
    rank: int
    control: Control
    reporter: Reporter


def run_rank(train: Callable[[TrainingProcess], None]) -> int:
    """Call `train` in the rank's folder, and report how it fails; the exit code. `train` enables garbage collection."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    control = Control()
    raise_priority()
    gc.disable()
    spec_path = Path(os.environ[SPEC_ENV])
    spec = AttemptSpec.from_json(spec_path.read_text())
    rank = int(os.environ["MLX_RANK"])
    events_path = os.environ.get(EVENTS_ENV)
    events = EventWriter(Path(events_path) if events_path else None, rank, spec.attempt)
    reporter = Reporter(events)
    try:
        os.chdir(spec.rank(rank).workdir)
        reporter.phase("loading")
        train(TrainingProcess(spec, spec_path.parents[2], rank, control, reporter))
    except BaseException as error:
        code = _report_failure(error, events)
        sys.stdout.flush()
        sys.stderr.flush()
        # Skips the interpreter's own shutdown, which would wait for the framework's threads, and they for peers that
        # are gone.
        os._exit(code)
    return TrainerExit.OK


def _report_failure(error: BaseException, events: EventWriter) -> TrainerExit:
    """Write the failure to the events and to standard error; returns the exit code."""
    name = type(error).__name__
    code = error.exit_code if isinstance(error, TrainerError) else TrainerExit.EXCEPTION
    text = "".join(traceback.format_exception(error))
    events.write("failure", error_type=name, message=str(error) or name, traceback=text, **getattr(error, "facts", {}))
    # What the user can fix is one line; what only we can fix is a traceback.
    expected = code != TrainerExit.EXCEPTION or isinstance(error, JobError)
    print(f"{name}: {error}" if expected else text, file=sys.stderr)
    return code
