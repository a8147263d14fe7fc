"""The tiny model, corpus and local cluster of `flightdeck demo`.

`engine.demo_model` creates them once, in its own process since it needs mlx, in `<home>/demo/<cache key>/`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import InputError, LaunchError
from engine.security.paths import make_home
from engine.security.sanitise import last_line

BATCH_SIZE = 8
MAX_RANKS = 8
MAKE_LIMIT_S = 120.0
"""Creating them takes about 2 s."""


def demo_config(home: Path, ranks: int = 2, iters: int = 60) -> Config:
    """The demo's configuration; creates its model and corpus if they are not cached, which blocks for seconds.

    Raises InputError for an impossible number of ranks or iterations, LaunchError when the creation fails."""
    if not 1 <= ranks <= MAX_RANKS:
        raise InputError(f"--ranks {ranks}", why=f"the demo runs on 1 to {MAX_RANKS} ranks")
    if iters < 1:
        raise InputError(f"--iters {iters}", why="the demo needs at least one iteration")
    made = ensure_made(home)
    workdir = home / "demo"
    model, data = str(made / "model"), str(made / "data")
    job: dict[str, Any] = {
        "model": model,
        "data": data,
        "fine_tune_type": "full",
        "batch_size": BATCH_SIZE,
        "iters": iters,
        "learning_rate": 3e-3,
        "steps_per_report": 1,
        "steps_per_eval": min(20, iters),
        "val_batches": 2,
        "save_every": min(20, iters),
        "max_seq_length": 256,
        # A sentence of its corpus, of which all else follows from this beginning.
        "sample_prompts": ["tower to heron: land"],
        "sample_every": iters,
        "sample_tokens": 7,
    }
    return Config(
        cluster=ClusterConfig(name="demo", backend="ring"),
        nodes=tuple(
            NodeConfig(name=f"node{rank}", python=sys.executable, workdir=str(workdir), model=model, data=data)
            for rank in range(ranks)
        ),
        job=JobConfig(name="demo", model=model, data=data, fine_tune_type="full", mlx_lm=with_defaults(job)),
    )


def cache_key() -> str:
    """Changes with demo_model.py and with the version of mlx-lm."""
    source = Path(__file__).with_name("demo_model.py").read_bytes()
    return hashlib.sha256(source + version("mlx-lm").encode()).hexdigest()[:16]


def ensure_made(home: Path) -> Path:
    """The directory with model/ and data/. Safe for concurrent callers; a killed one leaves nothing incomplete."""
    made = home / "demo" / cache_key()
    if (made / "model").is_dir():
        return made
    make_home(home)
    made.parent.mkdir(mode=0o700, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=made.parent))
    try:
        make(scratch)
        try:
            scratch.rename(made)
        except OSError:
            if not (made / "model").is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return made


def make(directory: Path) -> None:
    """Fill an empty directory. Raises LaunchError with the last line of the process."""
    argv = [sys.executable, "-m", "engine.demo_model", str(directory)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=MAKE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise LaunchError(
            "the demo's model could not be created", why=f"not finished after {MAKE_LIMIT_S:.0f} s"
        ) from late
    if done.returncode != 0:
        raise LaunchError(
            "the demo's model could not be created",
            why=last_line(done.stderr.decode(errors="replace")) or f"exit code {done.returncode}",
            todo="run `flightdeck doctor` to see what this machine lacks",
        )
