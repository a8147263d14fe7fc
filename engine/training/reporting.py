"""The reports of a trainer: events for the head, lines for people, and mlx-lm's callback for SwanLab, if any.
How a training ends, and its best validation so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.protocol.events import EventWriter
from engine.protocol.exit_codes import TrainerError, TrainerExit
from engine.protocol.job import JobError


@dataclass(frozen=True)
class Outcome:
    completed: bool
    stopped: bool
    iteration: int
    early: str | None = None
    """Why it is complete before the job's last iteration."""


def first_line(error: BaseException) -> str:
    """The first line of its message that says anything; its type without one."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


class GroupError(TrainerError):
    """The group could not be formed as planned, or its ranks do not have the same job, model and data."""

    exit_code = TrainerExit.GROUP


def check_equal(table: Sequence[Mapping[str, object]]) -> None:
    """Check that all ranks have the same job, model and data. `table`: the facts of each, by rank. Raises
    GroupError."""
    first, *others = table
    for rank, facts in enumerate(others, 1):
        for name, value in facts.items():
            if value != first[name]:
                raise GroupError(f"{name} of rank {rank} differs from rank 0's: make them the same on both nodes")


class PeerLost(TrainerError):
    """Another rank is gone: a consequence of its failure, not the cause."""

    exit_code = TrainerExit.PEER_LOST


class Diverged(TrainerError):
    """The loss or the gradient is not finite."""

    exit_code = TrainerExit.DIVERGED


_GOING_ON_S = 10.0
Files = list[tuple[str, int, str]]
"""The name of each below their folder, its bytes, and its SHA-256."""


@dataclass(frozen=True)
class SavedWeights:
    """Trained weights on this node's disk."""

    path: Path
    """The file, or the folder that is used as a whole."""
    bytes: int
    """The weights alone."""
    holds: str
    """"adapter", "weights" (those of the trained layers) or "model"."""
    folder: Path
    """That of the `files`, with which the weights can be used elsewhere."""
    files: Files


class Reporter:
    """One rank's reports. The lines on standard output are for people only: nothing parses them."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self.callback: Any = None
        """mlx-lm's TrainingCallback, on the rank that has one."""
        self._phase: str | None = None
        self._reported_at = time.monotonic()
        self._warned: set[str] = set()

    def print(self, text: str) -> None:
        print(text, flush=True)

    def event(self, event: str, **fields: Any) -> None:
        self._events.write(event, **fields)

    def phase(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self._events.write("phase", phase=phase)

    def going_on(self) -> None:
        """Report that a long phase makes progress, at most every _GOING_ON_S."""
        if time.monotonic() - self._reported_at > _GOING_ON_S:
            self._reported_at = time.monotonic()
            self._events.write("going_on", phase=self._phase)

    def warn(self, message: str, about: str = "") -> None:
        """Report `message` once, and of those that are `about` the same the first."""
        if (about or message) not in self._warned:
            self._warned.add(about or message)
            self._events.write("warning", message=message)
            self.print(f"warning: {message}")

    def report(self, iterations: int, values: dict[str, Any]) -> None:
        """mlx-lm's training report; `iterations` is how many there will be."""
        self._events.write("report", **values)
        if self.callback is not None:
            self.callback.on_train_loss_report(values)
        self.print(
            f"iteration {values['iteration']}/{iterations}  train loss {values['train_loss']:.4f}  "
            f"learning rate {values['learning_rate']:.3e}  {values['iterations_per_second']:.2f} it/s  "
            f"{values['tokens_per_second']:.0f} tok/s  peak {values['peak_memory']:.3f} GB"
        )

    def save(
        self, iteration: int, target: Path, write: Callable[[], SavedWeights], *, last: bool, **facts: float
    ) -> bool:
        """A save of weights into `target`, by `write`. A full disk is a warning, and the answer False, except for the
        `last` save, which raises OSError."""
        self.event("checkpoint", phase="begin", iteration=iteration, path=str(target))
        started = time.perf_counter()
        try:
            saved = write()
        except OSError as error:
            if last:
                raise
            self.warn(f"iteration {iteration}: not saved: {error}")
            return False
        done = {**vars(saved), "seconds": time.perf_counter() - started, **facts}
        self.event("checkpoint", phase="committed", iteration=iteration, **done)
        self.print(f"saved {saved.path}")
        return True

    def validation(self, values: dict[str, Any]) -> None:
        """mlx-lm's validation report."""
        self._events.write("validation", **values)
        if self.callback is not None:
            self.callback.on_val_loss_report(values)
        self.print(f"iteration {values['iteration']}  val loss {values['val_loss']:.4f}  in {values['val_time']:.2f} s")

    def test(self, iteration: int, loss: float) -> None:
        self._events.write("test", iteration=iteration, test_loss=loss, test_ppl=math.exp(loss))
        self.print(f"test loss {loss:.4f}, perplexity {math.exp(loss):.3f}")

    def end(self, outcome: Outcome) -> None:
        self._events.write("end", **asdict(outcome))
        how = "completed" if outcome.completed else "stopped"
        self.print(outcome.early or f"{how} at iteration {outcome.iteration}")


@dataclass
class ReportWindow:
    """Sums since the last report."""

    loss_sum: float = 0.0
    losses: int = 0
    iterations: int = 0
    tokens: int = 0
    seconds: float = 0.0
    trained_tokens: int = 0
    """Since the run started."""

    def add(self, loss: float | None, tokens: int, seconds: float) -> None:
        """One iteration: its global loss (None without targets), global tokens, and its seconds on this rank."""
        if loss is not None:
            self.loss_sum += loss
            self.losses += 1
        self.iterations += 1
        self.tokens += tokens
        self.seconds += seconds

    def require_targets(self) -> None:
        """Raises JobError if the run has trained on no token: its weights are what they were."""
        if not self.trained_tokens + self.tokens:
            why = "mask_prompt hides as many tokens as the prompt has, max_seq_length cuts the rest"
            raise JobError(f"no row that was trained on has a target, so that nothing was learned: {why}")

    def close(self, iteration: int, learning_rate: float, peak_memory_bytes: int) -> dict[str, Any]:
        """The report, in mlx-lm's names and units; the window starts again."""
        self.trained_tokens += self.tokens
        values = {
            "iteration": iteration,
            "train_loss": self.loss_sum / self.losses if self.losses else float("nan"),
            "learning_rate": learning_rate,
            "iterations_per_second": self.iterations / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "trained_tokens": self.trained_tokens,
            "peak_memory": peak_memory_bytes / 1e9,
        }
        self.loss_sum, self.losses, self.iterations, self.tokens, self.seconds = 0.0, 0, 0, 0, 0.0
        return values


@dataclass
class BestValidation:
    """By it weights are saved (`save_best`) and the training is ended early (`patience`). It is part of every
    checkpoint: a resumed training judges as one that was never interrupted, and each validation counts once: it
    repeats the one that follows its checkpoint's update."""

    loss: float | None = None
    """None before the first that is finite."""
    iteration: int = 0
    since: int = 0
    """Validations since then, none of them better."""

    def add(self, iteration: int, loss: float) -> bool:
        """True when this validation is better than all before it. A loss that is not finite never is."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.loss, self.iteration, self.since = loss, iteration, 0
            return True
        self.since += 1
        return False

    def is_over(self, patience: int | None) -> bool:
        """So many validations in a row were not better; never with None."""
        return patience is not None and self.since >= patience

    def early_stop(self, iteration: int) -> str:
        """Why the training ends at `iteration`, in one line."""
        best = f" (best {self.loss:.4f} at iteration {self.iteration})" if self.loss is not None else ""
        validations = "1 validation" if self.since == 1 else f"{self.since} validations"
        return f"stopped early at iteration {iteration}: the validation loss has not improved for {validations}{best}"

    def state(self) -> Mapping[str, Any]:
        """For a checkpoint; all finite."""
        return {name: value for name, value in asdict(self).items() if value is not None}
