"""Stock mlx_lm.lora, unchanged, on one rank: `python stock.py CONFIG LOG`, which tests.bench.throughput starts.

CONFIG is mlx_lm.lora's own file of options. Rank 0 writes to LOG what mlx-lm told its callback of each report, when (t,
seconds of a monotonic clock), and its processor seconds until then, a JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from mlx_lm import lora
from mlx_lm.tuner.callbacks import TrainingCallback


class Clock(TrainingCallback):  # type: ignore[misc]  # mlx-lm has no types
    """Writes down the training reports."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps({"t": time.monotonic(), "processor": time.process_time(), **train_info}) + "\n")


def main(config: str, log: Path) -> None:
    first = os.environ.get("MLX_RANK", "0") == "0"
    train(config, Clock(log) if first else None)


def train(config: str, callback: TrainingCallback | None) -> None:
    """mlx_lm.lora's own main program, which makes its reports to `callback`."""
    # The only entry point: what is given to its `run` is replaced there.
    lora.get_reporting_callbacks = lambda *_, **__: callback
    sys.argv = ["mlx_lm.lora", "--config", config]
    lora.main()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
