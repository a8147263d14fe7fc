"""All strategies beside one process, sharded and pipeline beside data: `uv run python -m tests.bench.partitioned`.

Real rings of 2 ranks on this machine, float32, the same global batches: the losses of 50 steps, the first gradients,
and MLX's own figures of memory, on small models of 3 layers (also with tied embeddings that are trained, and an uneven
split). The time of a step is beside data parallelism's on a larger model. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from tests.bench.figures import Figure, machine, report
from tests.training import partitioned_cases
from tests.training.partitioned_cases import PartitionedBench, Ran, make_models, relative
from tests.training.tiny import make_tiny, write_weights

STEPS: Final = 50
TIMED: Final = 12
NAMES: Final = ("full", "tied", "lora")
DIVISIONS: Final[dict[str, dict[str, Any]]] = {
    "data, shares 1:1": {"strategy": "data"},
    "data, shares 3:1": {"strategy": "data", "shares": [3.0, 1.0]},
    "sharded, shares 1:1": {"strategy": "sharded"},
    "sharded, shares 3:1": {"strategy": "sharded", "shares": [3.0, 1.0]},
    "pipeline 0-1,1-3": {"strategy": "pipeline", "split": "0-1,1-3"},
    "pipeline 0-2,2-3": {"strategy": "pipeline", "split": "0-2,2-3"},
}
LOSS, GRADIENT, STATE = 1e-4, 1e-5, 0.6
LARGE: Final = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 8}


def equal(bench: PartitionedBench, only: str) -> Iterator[Figure]:
    """Losses and gradients, of the divisions whose title has `only`."""
    alone = bench.run("alone", bench.cases(NAMES, "data", STEPS), 1)
    for title, keys in DIVISIONS.items():
        if only not in title:
            continue
        more = dict(keys)
        ran = bench.run(title.replace(" ", "-"), bench.cases(NAMES, more.pop("strategy"), STEPS, **more), 2)
        for name in NAMES:
            off = float(np.abs(np.array(alone[name].losses) - ran[name].losses).max())
            yield Figure(f"{title}, {name}: losses of {STEPS} steps", f"{off:.1e}", f"< {LOSS:g}", off < LOSS)
            off = relative(ran[name].gradients(), alone[name].gradients())
            yield Figure(f"{title}, {name}: first gradient", f"{off:.1e} relative", f"< {GRADIENT:g}", off < GRADIENT)


def memory_and_time(bench: PartitionedBench) -> Iterator[Figure]:
    """On the larger model, against data parallelism on as many ranks."""
    model = bench.home / "models" / "large"
    config = json.loads((bench.models["untied"] / "config.json").read_text()) | LARGE | {"num_hidden_layers": 8}
    model.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((bench.models["untied"] / file).read_bytes())
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model, config)
    job = bench.tiny.job(model=str(model), iters=TIMED)
    ran: dict[str, Ran] = {}
    for strategy in ("data", "sharded", "pipeline"):
        case = {"name": strategy, "split": "0-4,4-8", "job": {**job, "strategy": strategy}}
        ran |= partitioned_cases.run(bench.home / f"large-{strategy}", [case], 2)
    whole = max(rank["state"] for rank in ran["data"].ranks)
    took = statistics.median(ran["data"].ranks[0]["seconds"][2:])
    yield Figure("data: state of a rank", f"{whole / 1e6:.1f} MB")
    yield Figure("data: a step", f"{took * 1e3:.0f} ms")
    for strategy in ("sharded", "pipeline"):
        ranks = ran[strategy].ranks
        state = max(rank["state"] for rank in ranks) / whole
        yield Figure(
            f"{strategy}: state of the larger rank, beside data's", f"{state:.2f} x", f"<= {STATE:g}", state <= STATE
        )
        peak = max(rank["peak"] for rank in ranks) / max(rank["peak"] for rank in ran["data"].ranks)
        yield Figure(f"{strategy}: highest memory, beside data's", f"{peak:.2f} x")
        time = statistics.median(ranks[0]["seconds"][2:]) / took
        yield Figure(f"{strategy}: a step, beside data's", f"{time:.2f} x")


def main() -> int:
    options = argparse.ArgumentParser(description="The strategies beside one process.")
    options.add_argument("--only", default="", help="divisions whose title has this; without memory and time")
    only = options.parse_args().only
    print(machine())
    with TemporaryDirectory() as directory:
        home = Path(directory)
        tiny = make_tiny(home / "tiny")
        bench = PartitionedBench(tiny, make_models(tiny, home / "models"), home)
        return report(itertools.chain(() if only else memory_and_time(bench), equal(bench, only)))


if __name__ == "__main__":
    sys.exit(main())
