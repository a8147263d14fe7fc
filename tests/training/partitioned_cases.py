"""Trainings of the partitioned strategies, on ranks of a ring on this machine (tests.training.partitioned_program), and
their comparison with one process on the same global batches.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import quantize_model, save_model

from engine.trainer.weights import scalar
from tests.forked import Forked, ForkServer
from tests.training.tiny import Tiny, write_weights
from tests.unit.launch.host_layouts import ring_ports

LIMIT_S = 240.0


@dataclass
class Ran:
    """What one case left on all ranks."""

    directory: Path
    name: str
    ranks: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        losses: list[float] = self.ranks[0]["losses"]
        return losses

    def gradients(self) -> dict[str, mx.array]:
        """The gradients of the first update, from all ranks together."""
        return self._arrays(*(f"gradients.{rank}" for rank in range(len(self.ranks))))

    def trained_weights(self) -> dict[str, mx.array]:
        return self._arrays("trained")

    def _arrays(self, *kinds: str) -> dict[str, mx.array]:
        found: dict[str, mx.array] = {}
        for kind in kinds:
            found |= loaded(self.directory / f"{self.name}.{kind}.safetensors")
        return found


def loaded(path: Path) -> dict[str, mx.array]:
    """A file of safetensors."""
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    return arrays


@functools.cache
def fork_server() -> ForkServer:
    """Of the programs of these tests: the second imports the first."""
    return ForkServer(sys.executable, "tests.training.lost_peer_program")


def start_ranks(program: str, directory: Path, ranks: int) -> list[Forked]:
    """Start a module, with `directory` as its argument, on so many ranks of a ring on this machine. What they print is
    in `rank<N>.log` there."""
    first = ring_ports(ranks)
    hosts = directory / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{first + rank}"] for rank in range(ranks)]))
    own = {"RANKS": str(ranks), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        own["MLX_HOSTFILE"] = str(hosts)
    started = []
    for rank in range(ranks):
        environment = {**os.environ, **own, "MLX_RANK": str(rank)}
        with (directory / f"rank{rank}.log").open("wb") as log:
            started.append(Forked(fork_server(), program, str(directory), environment=environment, output=log.fileno()))
    return started


def run_ranks(program: str, directory: Path, ranks: int, limit_s: float = LIMIT_S) -> None:
    """As `start_ranks`, until all have succeeded."""
    started = start_ranks(program, directory, ranks)
    try:
        codes = [process.wait(limit_s) for process in started]
    finally:
        for process in started:
            process.kill()
    output = [(directory / f"rank{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(text[-3000:] for text in output)


def run(directory: Path, cases: list[dict[str, Any]], ranks: int) -> dict[str, Ran]:
    """Run the cases on so many ranks; by name."""
    directory.mkdir(parents=True)
    (directory / "cases.json").write_text(json.dumps(cases))
    run_ranks("tests.training.partitioned_program", directory, ranks)
    results = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {
        case["name"]: Ran(directory, case["name"], [reported[case["name"]] for reported in results]) for case in cases
    }


_EMBEDDED = {"keys": ["self_attn.q_proj", "model.embed_tokens"], "rank": 4, "scale": 2.0, "dropout": 0.0}


@dataclass(frozen=True)
class Case:
    """One training."""

    model: str = "untied"
    keys: dict[str, Any] = field(default_factory=dict)
    """Keys of the job."""
    divided: dict[str, Any] = field(default_factory=dict)
    """Keys of the job where it is divided over ranks."""
    embeddings: bool = False
    """The embeddings are trained whole as well."""
    tolerance: float = 1e-4
    """Relative, of the losses."""
    gradients: float = 1e-5
    """Relative, of the first update."""


CASES = {
    "full": Case(),
    "tied": Case("tied", embeddings=True),
    "lora": Case(
        "tied",
        {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": _EMBEDDED},
        divided={"sequence_tiling": 16},
    ),
    "clipped": Case(
        keys={"max_grad_norm": 0.1, "optimizer": "adamw", "grad_accumulation_steps": 2},
        divided={"sequence_tiling": 8},
    ),
}
MORE = {
    "few layers": Case(keys={"fine_tune_type": "lora", "num_layers": 1}),
    "dora": Case(keys={"fine_tune_type": "dora", "num_layers": 3}),
    "quantized": Case("quantized", {"fine_tune_type": "lora"}),
    "muon": Case(keys={"optimizer": "muon"}),
    "adafactor": Case(keys={"optimizer": "adafactor"}),
    "sgd": Case(keys={"optimizer": "sgd"}),
    "checkpointed": Case(keys={"grad_checkpoint": 1}, divided={"sequence_tiling": 8}),
    "bfloat16": Case("bfloat16", tolerance=0.02, gradients=0.02),
    "float16": Case("float16", tolerance=0.01, gradients=0.01),
}
DEEP = {"four layers": Case("deep")}


def make_models(tiny: Tiny, home: Path) -> dict[str, Path]:
    """Three layers each, if not said otherwise, with sizes that no number of ranks divides."""
    shape = {"hidden_size": 36, "intermediate_size": 54, "num_attention_heads": 3, "num_key_value_heads": 3}
    config = json.loads((tiny.model / "config.json").read_text()) | shape | {"num_hidden_layers": 3, "vocab_size": 385}
    for name, own in {
        "untied": {},
        "tied": {"tie_word_embeddings": True},
        "deep": {"num_hidden_layers": 4},
        "wide": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    }.items():
        directory = home / name
        directory.mkdir(parents=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (directory / file).write_bytes((tiny.model / file).read_bytes())
        made = config | own
        (directory / "config.json").write_text(json.dumps(made))
        write_weights(directory, made)
    for name, dtype in {"bfloat16": mx.bfloat16, "float16": mx.float16}.items():
        _variant(home / "untied", home / name)
        weights = loaded(home / "untied" / "model.safetensors")
        mx.save_safetensors(
            str(home / name / "model.safetensors"), {key: value.astype(dtype) for key, value in weights.items()}
        )
    _quantized(home / "wide", home / "quantized")
    return {path.name: path for path in home.iterdir()}


def _variant(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())


def _quantized(source: Path, target: Path) -> None:
    _variant(source, target)
    config = json.loads((source / "config.json").read_text())
    model = Model(ModelArgs.from_dict(config))
    model.load_weights(str(source / "model.safetensors"))
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(target, model)
    (target / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class PartitionedBench:
    """Where the models and what one process made of them are."""

    tiny: Tiny
    models: dict[str, Path]
    home: Path

    def cases(self, names: Iterable[str], strategy: str, iters: int, **more: Any) -> list[dict[str, Any]]:
        every = {**CASES, **MORE, **DEEP}
        return [
            {
                "name": name,
                "embeddings": every[name].embeddings,
                "job": self.tiny.job(
                    model=str(self.models[every[name].model]),
                    iters=iters,
                    strategy=strategy,
                    **every[name].keys,
                    **(every[name].divided if strategy != "data" else {}),
                ),
                **more,
            }
            for name in names
        ]

    def run(self, name: str, cases: list[dict[str, Any]], ranks: int) -> dict[str, Ran]:
        return run(self.home / name, cases, ranks)


def compare(name: str, alone: Ran, ran: Ran) -> None:
    """Losses, norms, the first update's gradients, validation and what is saved at the end."""
    case = {**CASES, **MORE, **DEEP}[name]
    assert np.abs(np.array(alone.losses) - ran.losses).max() < case.tolerance
    assert all(rank["losses"] == ran.losses for rank in ran.ranks)
    assert ran.ranks[0]["norms"] == [rank["norms"] for rank in ran.ranks][-1]
    assert np.allclose(alone.ranks[0]["norms"], ran.ranks[0]["norms"], rtol=max(1e-4, case.gradients))
    assert abs(alone.ranks[0]["valid"] - ran.ranks[0]["valid"]) < case.tolerance
    expected, gradients = alone.gradients(), ran.gradients()
    assert gradients.keys() == expected.keys()
    assert relative(gradients, expected) < case.gradients
    before, after = alone.trained_weights(), ran.trained_weights()
    assert [(key, value.shape, value.dtype) for key, value in sorted(after.items())] == [
        (key, value.shape, value.dtype) for key, value in sorted(before.items())
    ]


def relative(found: dict[str, mx.array], expected: dict[str, mx.array]) -> float:
    """The norm of the difference over the norm, of all together."""
    off = [scalar(mx.square(found[key] - value).sum()) for key, value in expected.items()]
    whole = [scalar(mx.square(value).sum()) for value in expected.values()]
    return math.sqrt(sum(off) / sum(whole))
