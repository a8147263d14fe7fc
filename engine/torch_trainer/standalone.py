"""The PyTorch trainer without Flight Deck around it, as `flightdeck plan --write` prints it:

    torchrun … -m engine.torch_trainer.standalone job.json

job.json has the backend, the job with each "auto" resolved, and with ZeRO the path of ds_config.json. Paths are
relative to the working directory; the weights go to `adapter_path` or below standalone/, where each rank's events are,
too. torchrun, or whatever starts it, sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from engine.protocol.attempt import EVENTS_ENV, SPEC_ENV, AttemptSpec, RankSpec
from engine.protocol.job import DEEPSPEED_CONFIG_ENV


def main() -> None:
    request = json.loads(Path(sys.argv[-1]).read_text())
    rank, size, here = os.environ["RANK"], int(os.environ["WORLD_SIZE"]), str(Path.cwd())
    ranks = [
        RankSpec(rank=number, node=f"rank {number}", python=sys.executable, workdir=here) for number in range(size)
    ]
    spec = AttemptSpec(
        run_id="standalone",
        attempt=1,
        nonce="",
        backend=request["backend"],
        world_size=size,
        ranks=ranks,
        job=request["job"],
    )
    # The trainer takes the folder two above it for the run's.
    path = Path(here, "standalone", "attempts", "1", f"spec.{rank}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(spec.to_json())
    os.environ |= {SPEC_ENV: str(path), "MLX_RANK": rank}
    if "deepspeed_config" in request:
        os.environ[DEEPSPEED_CONFIG_ENV] = str(Path(request["deepspeed_config"]).absolute())
    os.environ.setdefault(EVENTS_ENV, str(path.with_name(f"events.{rank}.jsonl")))
    runpy.run_module("engine.torch_trainer.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
