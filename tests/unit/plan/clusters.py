"""Clusters and jobs to plan for: by hand, or at random."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from engine.cluster.topology import topology
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.measurements import Calibration, LinkMeasure, NodeMeasure
from engine.models import Interface, NodeFacts
from engine.plan.context import PlanInputs, Tools
from engine.plan.network import plan_network

NOW = datetime(2026, 3, 14, 14, 2, 12, tzinfo=UTC)
GB = 10**9
QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""As Qwen3-4B's config.json has them."""
QWEN3_32B = QWEN3_4B | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "intermediate_size": 25_600,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
}
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def mac(name: str, rank: int, chip: str, gb: int, **more: Any) -> NodeFacts:
    """A Mac on the network that all share; Metal lets it use three quarters of its memory."""
    known: dict[str, Any] = {
        "system": "Darwin",
        "chip": chip,
        "gpu": "gpu",
        # hw.memsize as Macs report it.
        "memory_total_bytes": gb * 2**30,
        "gpu_limit_bytes": gb * 2**30 * 3 // 4,
        "backends": ("ring", "jaccl"),
        "interfaces": (Interface(name="en0", ipv4=(f"10.0.0.{rank + 1}/24",), active=True),),
    }
    return NodeFacts(node=name, host=f"{name}.local", probed_at=NOW, **{**known, **more})


def ultra_and_max() -> list[NodeFacts]:
    return [mac("ultra", 0, "Apple M3 Ultra", 512), mac("max", 1, "Apple M4 Max", 128)]


def inputs(nodes: list[NodeFacts], *, settings: Mapping[str, Any] | None = None, **more: Any) -> PlanInputs:
    """The inputs of a job on nodes that have these facts; `more` are fields of PlanInputs, or of the job (`job`)."""
    keys = dict(settings or {})
    job = {
        "name": "support",
        "model": "~/model",
        "data": "~/data",
        "fine_tune_type": keys.get("fine_tune_type", "lora"),
        "mlx_lm": with_defaults(keys),
        "given": tuple(sorted(keys)),
        "strategy": more.pop("strategy", "data"),
        **more.pop("job", {}),
    }
    config = Config(
        nodes=tuple(
            NodeConfig(name=fact.node, ssh=fact.host, ips=(), python="~/venv/bin/python", workdir="~") for fact in nodes
        ),
        job=JobConfig(**job),
        **{"cluster": ClusterConfig(name="studio"), **more.pop("config", {})},
    )
    joined = topology(nodes)
    given: dict[str, Any] = {
        "config": config,
        "now": NOW,
        "topology": joined,
        "tools": Tools(python="/venv/bin/python", flightdeck="flightdeck"),
        "facts": {fact.node: fact for fact in nodes},
        "network": plan_network(config, nodes, joined),
        "model": QWEN3_4B,
        "model_source": "config.json on ultra",
        "examples": 10_000,
        "examples_source": "counted in train.jsonl on ultra",
    }
    return PlanInputs(**(given | more))


def calibration(speeds: Mapping[str, float | None], *, age: timedelta = timedelta(hours=2), **more: Any) -> Calibration:
    """Each node's examples a second, and a link that costs little."""
    given: dict[str, Any] = {
        "cluster": "studio",
        "job": "support",
        "fingerprint": "as asked",
        "taken_at": NOW - age,
        "nodes": tuple(
            NodeMeasure(node=name, host=f"{name}.local", examples_per_s=speed, spread=0.02)
            for name, speed in speeds.items()
        ),
        "all_ranks": LinkMeasure(nodes=tuple(speeds), latency_s=5e-5, bandwidth_bytes_per_s=5e9),
        "gradient_bytes": 50_000_000,
        "connected_as": ("data", "local"),
    }
    return Calibration(**(given | more))


@st.composite
def plan_inputs(draw: st.DrawFn) -> PlanInputs:
    """Any cluster of 1 to 8 Macs with any job, measured or not."""
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.sampled_from([16, 64, 128, 192, 512]), min_size=count, max_size=count))
    chips = draw(st.lists(st.sampled_from(["Apple M4 Max", "Apple M3 Ultra"]), min_size=count, max_size=count))
    facts = [mac(f"n{rank}", rank, chip, gb) for rank, (chip, gb) in enumerate(zip(chips, sizes, strict=True))]
    kind = draw(st.sampled_from(["lora", "dora", "full"]))
    settings: dict[str, Any] = {
        "fine_tune_type": kind,
        "batch_size": draw(st.integers(1, 64)),
        "grad_accumulation_steps": draw(st.integers(1, 8)),
        "iters": draw(st.integers(1, 100_000)),
        "optimizer": draw(st.sampled_from(["adam", "sgd", "muon"])),
        "max_seq_length": draw(st.sampled_from([128, 2048, 8192])),
        "grad_checkpoint": draw(st.booleans()),
    }
    batch = draw(st.sampled_from(["batch_size", "batch_tokens", None]))
    if batch != "batch_size":
        del settings["batch_size"]
    if batch == "batch_tokens":
        settings["batch_tokens"] = draw(st.integers(1, 10**6))
    speed = st.floats(0.05, 50, allow_nan=False)
    measured = draw(st.one_of(st.none(), st.lists(speed, min_size=count, max_size=count)))
    taken = calibration({fact.node: s for fact, s in zip(facts, measured, strict=True)}) if measured else None
    return inputs(
        facts,
        settings=settings,
        strategy=draw(st.sampled_from(["data", "sharded", "pipeline", "local"])),
        model=draw(st.sampled_from([None, QWEN3_4B, QWEN3_32B, LLAMA_70B])),
        examples=draw(st.one_of(st.none(), st.integers(1, 10**7))),
        lengths=draw(st.dictionaries(st.integers(1, 10_000), st.integers(1, 100), max_size=20)),
        calibration=taken,
    )
