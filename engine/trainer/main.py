"""The trainer: one rank's training process, started by the keeper with everything it needs in its environment.

MLX is imported late, and mlx-lm only after the group is up: a rank that connects 15 seconds after the others fails
the ring's start, so nothing slow may run in between. Exit codes: `TrainerExit`.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path

from engine.node.processes import raise_priority
from engine.protocol.attempt import EVENTS_ENV, SPEC_ENV, AttemptSpec
from engine.protocol.events import EventWriter
from engine.protocol.exit_codes import TrainerError, TrainerExit
from engine.protocol.job import JobError
from engine.trainer.control import Control


def main() -> int:
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
    try:
        _run(spec, spec_path.parents[2], rank, control, events)
    except BaseException as error:
        code = _report_failure(error, events)
        sys.stdout.flush()
        sys.stderr.flush()
        # Skips the interpreter's own shutdown, which would wait for MLX's threads, and they for peers that are gone.
        os._exit(code)
    return TrainerExit.OK


def _run(spec: AttemptSpec, home: Path, rank: int, control: Control, events: EventWriter) -> None:
    from engine.trainer.elastic_group import join_group
    from engine.trainer.reporting import Reporter

    node = spec.rank(rank)
    os.chdir(node.workdir)
    reporter = Reporter(events)
    reporter.phase("loading")
    collective, backend = join_group(spec, rank, reporter.warn)
    reporter.print(f"rank {rank} of {spec.world_size} on {node.node}, backend {backend}: loading")
    from engine.trainer.train import train

    # What the imports have made stays: no collection looks through it, not the one at the end either.
    gc.freeze()
    gc.enable()
    train(spec, home, collective, control, reporter)


def _report_failure(error: BaseException, events: EventWriter) -> TrainerExit:
    """Write the failure to the events and to standard error; returns the exit code."""
    name = type(error).__name__
    code = error.exit_code if isinstance(error, TrainerError) else TrainerExit.EXCEPTION
    text = "".join(traceback.format_exception(error))
    events.write("failure", error_type=name, message=str(error) or name, traceback=text, **getattr(error, "facts", {}))
    # What the user can fix is one line; what only we can fix is a traceback.
    known = code != TrainerExit.EXCEPTION or isinstance(error, JobError)
    print(f"{name}: {error}" if known else text, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
