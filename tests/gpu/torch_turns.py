"""The turns of a training that another program times: see torch_ours and torch_plain. Each line of stdin has a number
of steps; when they are done, one line is printed, "turn " and JSON: their `seconds`, and the allocator's `peak_bytes`.
Both read a JSON file, whose path is their argument: the `job` of the built-in trainer, `backend`, `tokens` of a
sequence, and `folder`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch


def read_request() -> dict[str, Any]:
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return request


def say_ready() -> None:
    print('turn {"ready": true}', flush=True)


class Turn:
    """One turn, from the moment at which it is asked for."""

    def __init__(self) -> None:
        """Ends the process where there are no more turns."""
        line = sys.stdin.readline()
        if not line.strip():
            os._exit(0)
        self.steps = int(line)
        _synchronize()
        self._started = time.perf_counter()

    def end(self) -> None:
        _synchronize()
        seconds = time.perf_counter() - self._started
        peak = int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
        print(f"turn {json.dumps({'seconds': seconds, 'peak_bytes': peak})}", flush=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
