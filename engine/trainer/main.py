"""The MLX trainer: `python -m engine.trainer.main`.

MLX is imported late, and mlx-lm only after the group is up: a rank that connects 15 seconds after the others fails
the ring's start, so nothing slow may run in between.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from engine.training.process import TrainingProcess, run_rank


def main() -> int:
    return run_rank(_run)


def _run(process: TrainingProcess) -> None:
    from engine.trainer.collective import Collective
    from engine.trainer.elastic_group import ElasticGroup

    spec, rank, reporter = process.spec, process.rank, process.reporter
    backend = spec.backend
    collective: Collective
    if (spec.job or {}).get("strategy") == "local":
        # The hostfile of MLX's ring, in which rank 0's first address is the group's.
        address = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())[0][0] if spec.world_size > 1 else None
        backend = f"tcp to {address}" if address is not None else "none"
        collective = ElasticGroup(address, spec.nonce.encode(), spec.world_size, rank, reporter.warn)
    else:
        collective = Collective(spec.backend, spec.world_size, rank)
    reporter.print(f"rank {rank} of {spec.world_size} on {spec.rank(rank).node}, backend {backend}: loading")
    from engine.trainer.train import train

    # What the imports have made stays: no collection looks through it, not the one at the end either.
    gc.freeze()
    gc.enable()
    train(spec, process.home, collective, process.control, reporter)


if __name__ == "__main__":
    sys.exit(main())
