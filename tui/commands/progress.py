"""How far a measurement has come, line by line."""

from __future__ import annotations

from engine.api import CalibrationProgress
from tui.commands.terminal import Lines
from tui.formatting import throughput

_EVERY_S = 5.0
"""Between two lines on the same thing that is measured."""


class ProgressLines:
    """A line for each new phase, and now and then for one that goes on."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._printed: dict[str, tuple[str, float]] = {}

    def update(self, step: CalibrationProgress) -> None:
        phase, elapsed_s = self._printed.get(step.what, ("", 0.0))
        if step.phase == phase and step.elapsed_s - elapsed_s < _EVERY_S:
            return
        self._printed[step.what] = step.phase, step.elapsed_s
        so_far = f"  {step.elapsed_s:.0f} of {step.seconds:g} s" if step.seconds and step.elapsed_s else ""
        speed = f"  {throughput(step.examples_per_s)}" if step.examples_per_s is not None else ""
        note = f": {step.note}" if step.note else ""
        self._lines.say(f"{step.what}: {step.phase}{so_far}{speed}{note}")
