"""What a benchmark prints: its figures beside their targets, and what they were measured on."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class Figure:
    """One measured value and what it has to be."""

    name: str
    value: str
    target: str = ""
    met: bool = True

    @property
    def verdict(self) -> str:
        return "" if not self.target else "met" if self.met else "MISSED"


def system() -> str:
    """What was measured on."""
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    )


def machine() -> str:
    """What was measured on, and how busy that was before."""
    return f"{system()}, load {os.getloadavg()[0]:.1f} before"


def report(figures: Iterable[Figure]) -> int:
    """Print each figure with its verdict; the exit code, 1 when a target is missed."""
    met = True
    for figure in figures:
        print(f"{figure.name:<54} {figure.value:>26}  {figure.target:<14} {figure.verdict}", flush=True)
        met = met and figure.met
    return 0 if met else 1


def measure(description: str, figures: Callable[[int, Path], Iterable[Figure]], option: str, default: int) -> int:
    """The program of a benchmark whose `figures` take a number, its one option, and an empty folder: as `report`."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(option, type=int, default=default, dest="number")
    number = options.parse_args().number
    print(machine())
    with TemporaryDirectory() as directory:
        return report(figures(number, Path(directory)))
