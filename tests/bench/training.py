"""What is measured of the training, one table after the other: `uv run python -m tests.bench.training`.

Strategies against one process, throughput beside stock mlx_lm.lora's, the cost of checkpoints, bfloat16 beside float32,
and recovery. Each is a command of its own, too, with options of its own. About half an hour on two cores that are left
alone. Exits 1 when a target is missed.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

PARTS: Final = ("partitioned", "checkpoint_cost", "precision", "recovery", "throughput")


def main() -> int:
    failed = []
    for part in PARTS:
        module = f"tests.bench.{part}"
        print(f"\n== python -m {module}", flush=True)
        # In a process of its own: what one sets in MLX is not for the next.
        if subprocess.run([sys.executable, "-m", module], check=False).returncode:
            failed.append(part)
    print(f"\nmissed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
