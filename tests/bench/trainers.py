"""Our trainer and stock mlx_lm.lora on the same model and data, for the benchmarks that compare them: each by real
mlx.launch, on ranks of this machine.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.protocol.attempt import END
from tests.training.launching import Launched, launch, run_under_launcher

RUN_LIMIT_S: Final = 1800.0
_STOCK = Path(__file__).with_name("stock.py")


def run_ours(
    directory: Path,
    job: dict[str, Any],
    shares: Sequence[float],
    cores: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Launched:
    """Our trainer on a rank per share, each held to its core of `cores` if there are any; only then it can have an
    `environment`. Raises AssertionError."""
    assert cores or not environment
    overrides = {rank: {"python": str(_pinned(directory, core, environment or {}))} for rank, core in enumerate(cores)}
    # Nobody says a word to the keepers meanwhile.
    run = launch(directory, job, shares=tuple(shares), overrides=overrides, spec_fields={"lease_s": RUN_LIMIT_S})
    try:
        run.launcher.wait(RUN_LIMIT_S)
    except BaseException:
        run.send(END)
        raise
    return run.succeeded()


def run_stock(
    directory: Path, options: dict[str, Any], ranks: int, environment: Mapping[str, str], *, pinned: bool = False
) -> list[dict[str, Any]]:
    """mlx_lm.lora with these `options`, each rank held to the core of its number if `pinned`; the reports of rank 0,
    as tests.bench.stock writes them down. Raises AssertionError with the end of its log when there are none."""
    config, log = directory / "options.json", directory / "reports.jsonl"
    config.write_text(json.dumps(options | {"train": True}))
    program = shlex.join([sys.executable, str(_STOCK), str(config), str(log)])
    # mlx.launch gives a lone rank an empty hostfile, on which MLX fails. Else as our own ranks: in sessions of
    # their own, and off the launcher's pipes, on which it would burn a core.
    prepare = "unset MLX_HOSTFILE; " if ranks == 1 else ""
    prepare += "".join(f"export {name}={shlex.quote(value)}; " for name, value in environment.items())
    prepare += "echo $$ >rank$MLX_RANK.pid; "
    hold = "taskset -c $MLX_RANK " if pinned else ""
    held = f"{prepare}exec setsid --wait {hold}{program} </dev/null >>rank$MLX_RANK.log 2>&1"
    started = run_under_launcher(directory, ranks, ["/bin/sh", "-c", held], "0" * 32)
    assert started.process is not None
    logs = [directory / f"rank{rank}.log" for rank in range(ranks)]
    try:
        while not all(path.exists() for path in logs) and started.process.poll() is None:
            time.sleep(0.1)
        started.drop_pipes()
        started.process.wait(RUN_LIMIT_S)
    except BaseException:
        started.process.kill()
        for path in directory.glob("rank*.pid"):
            os.kill(int(path.read_text()), signal.SIGKILL)
        raise
    reports = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not reports:
        raise AssertionError((directory / "rank0.log").read_text()[-2000:])
    return reports


def _pinned(directory: Path, core: int, environment: Mapping[str, str]) -> Path:
    """A python held to one core."""
    path = directory / f"python{core}"
    words = ["env", *(f"{name}={value}" for name, value in environment.items()), "taskset", "-c", str(core)]
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*words, sys.executable])} "$@"\n')
    path.chmod(0o755)
    return path
