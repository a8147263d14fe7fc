"""One rank of a test that kills another one: updates without end, in small buckets. When a peer is lost, it writes
whether its state is that of its last update, and exits with 5.

    python -m tests.training.lost_peer_program DIRECTORY      (with a ring's environment; case.json is there)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.protocol import exchange
from engine.protocol.job import Job
from engine.trainer.collective import Collective
from engine.trainer.model import load_model, row_format
from engine.training.data import Split
from engine.training.reporting import PeerLost
from tests.training.partitioned_program import strategy


def digest(training: Any) -> str:
    """Of the whole state, bit for bit."""
    found = hashlib.sha256()
    for group, arrays in training.state().items():
        for name, value in arrays.items():
            found.update(f"{group} {name}".encode() + np.asarray(value.reshape(-1).view(mx.uint8)).tobytes())
    return found.hexdigest()


def main(directory: Path) -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    exchange.LEAST_BUCKET = 1_000
    case = json.loads((directory / "case.json").read_text())
    job = Job.from_spec(case["job"], model=None, data=None, workdir=directory, home=directory)
    rank = int(os.environ["MLX_RANK"])
    collective = Collective("ring", int(os.environ["RANKS"]), rank)
    model, tokenizer = load_model(job)
    training = strategy(job, model, Split(job, "train", row_format(job, tokenizer), lambda _: None), collective, case)
    training.model.train()
    done, last = 0, digest(training)
    try:
        for position in itertools.count():
            share = training.accumulate(position, last=(ends := (position + 1) % job.grad_accumulation_steps == 0))
            if ends:
                training.apply(training.exchange([float(share.tokens)])[0])
                done, last = done + 1, digest(training)
                (directory / f"rank{rank}.updates").write_text(str(done))
    except PeerLost:
        found = {"updates": done, "kept": digest(training) == last}
        (directory / f"rank{rank}.json").write_text(json.dumps(found))
        os._exit(5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
