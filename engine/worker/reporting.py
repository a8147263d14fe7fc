"""What the trainer says: events for the head, plain lines for people, and mlx-lm's callbacks where asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .events import EventWriter
from .job import Job


class Reporter:
    """One rank's voice. The lines on standard output are for reading only: nothing parses them."""

    def __init__(self, rank: int, events: EventWriter) -> None:
        self._rank = rank
        self._events = events
        self._callback: Any = None
        self._phase: str | None = None
        self._warned: set[str] = set()

    def attach_callbacks(self, job: Job) -> None:
        """W&B and SwanLab through mlx-lm's own callbacks, on rank 0 alone."""
        if not job.report_to or self._rank != 0:
            return
        # Imported when asked for: it pulls in the services' own packages.
        from mlx_lm.tuner.callbacks import get_reporting_callbacks

        config = {key: str(value) for key, value in dataclasses.asdict(job).items()}
        self._callback = get_reporting_callbacks(
            job.report_to, project_name=job.project_name, log_dir=str(job.adapter_path), config=config
        )

    def say(self, text: str) -> None:
        print(text, flush=True)

    def event(self, event: str, **fields: Any) -> None:
        self._events.write(event, **fields)

    def phase(self, phase: str) -> None:
        """Announce `phase` unless it is the one already announced."""
        if phase != self._phase:
            self._phase = phase
            self._events.write("phase", phase=phase)

    def warn(self, message: str) -> None:
        """Say `message` once."""
        if message not in self._warned:
            self._warned.add(message)
            self._events.write("warning", message=message)
            self.say(f"warning: {message}")

    def report(self, iterations: int, values: dict[str, Any]) -> None:
        """mlx-lm's training report; `iterations` is how many there will be."""
        self._events.write("report", **values)
        if self._callback is not None:
            self._callback.on_train_loss_report(values)
        self.say(
            f"iteration {values['iteration']}/{iterations}  train loss {values['train_loss']:.4f}  "
            f"learning rate {values['learning_rate']:.3e}  {values['iterations_per_second']:.2f} it/s  "
            f"{values['tokens_per_second']:.0f} tok/s  peak {values['peak_memory']:.3f} GB"
        )

    def validation(self, values: dict[str, Any]) -> None:
        """mlx-lm's validation report."""
        self._events.write("validation", **values)
        if self._callback is not None:
            self._callback.on_val_loss_report(values)
        self.say(f"iteration {values['iteration']}  val loss {values['val_loss']:.4f}  in {values['val_time']:.2f} s")


class ReportWindow:
    """What happened since the last report."""

    def __init__(self, counted: Mapping[str, Any] | None = None) -> None:
        """`counted`: what another window had `counted`, to go on from."""
        known = counted or {}
        self._loss_sum = float(known.get("loss_sum", 0.0))
        self._losses = int(known.get("losses", 0))
        self._iterations = int(known.get("iterations", 0))
        self._tokens = int(known.get("tokens", 0))
        self._seconds = float(known.get("seconds", 0.0))
        self._trained_tokens = int(known.get("trained_tokens", 0))

    @property
    def counted(self) -> dict[str, float]:
        return {
            "loss_sum": self._loss_sum,
            "losses": self._losses,
            "iterations": self._iterations,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "trained_tokens": self._trained_tokens,
        }

    def add(self, loss: float | None, tokens: int, seconds: float) -> None:
        """One iteration: its global loss (None without targets), global tokens, and how long it took here."""
        if loss is not None:
            self._loss_sum += loss
            self._losses += 1
        self._iterations += 1
        self._tokens += tokens
        self._seconds += seconds

    def close(self, iteration: int, learning_rate: float) -> dict[str, Any]:
        """The report, in mlx-lm's names and units, and a new window."""
        self._trained_tokens += self._tokens
        values = {
            "iteration": iteration,
            "train_loss": self._loss_sum / self._losses if self._losses else float("nan"),
            "learning_rate": learning_rate,
            "iterations_per_second": self._iterations / self._seconds,
            "tokens_per_second": self._tokens / self._seconds,
            "trained_tokens": self._trained_tokens,
            "peak_memory": mx.get_peak_memory() / 1e9,
        }
        self._loss_sum, self._losses, self._iterations, self._tokens, self._seconds = 0.0, 0, 0, 0, 0.0
        return values
