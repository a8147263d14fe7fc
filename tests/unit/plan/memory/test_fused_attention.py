"""Where MLX on Metal computes attention's gradient in tiles, no scores of all pairs of tokens are counted.

The conditions are those of MLX 0.32.4's library. What only a Mac can measure is compared with figures that were
published for an M1 Max: one causal step at 8,192 tokens takes 0.68 GiB, and 12.53 with an MLX before it. The sizes of
its heads were not published with them; both follow from 32 heads of 128 with 8 for the keys, in 16 bits.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest

from engine.plan.document import MemorySection, TrainingPlan
from engine.plan.memory.architecture import Layer, Sublayer
from engine.plan.memory.estimate import RankWorkload, estimate, kept_per_token, working_per_token
from engine.plan.memory.shape import ModelShape
from engine.plan.planner import make_plan
from engine.protocol.partition import CUDA_PADDED, CUDA_QUERIES, FUSED_HEAD_DIMS
from tests.unit.cluster.cuda_nodes import cpu_node, cuda_node
from tests.unit.plan.clusters import QWEN3_4B, inputs, mac
from tests.unit.plan.memory.tiny import TINY

GIB = 2**30
Fusing = Literal["", "metal", "cuda"]
FUSING: tuple[Fusing, ...] = ("metal", "")
QWEN3_8B_4BIT = QWEN3_4B | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "tie_word_embeddings": False,
    "quantization": {"bits": 4, "group_size": 64},
}
AUTO_TILES = {"batch_size": 1, "num_layers": -1, "max_seq_length": 8192, "grad_checkpoint": "auto"}
LONG = {**AUTO_TILES, "sequence_tiling": 0}


def planned(version: str | None, model: dict[str, Any] = QWEN3_8B_4BIT, **job: Any) -> TrainingPlan:
    node = mac("m1", 0, "Apple M1 Max", 32, mlx=version)
    return make_plan(inputs([node], settings=LONG, model=model, job=job))


def refusals(plan: TrainingPlan) -> str:
    return " ".join(issue.text for issue in plan.refusals)


def test_qwen3_8b_in_4_bits_trains_at_8192_tokens_in_32_gb() -> None:
    plan = planned("0.32.4")
    assert not plan.refusals
    assert isinstance(plan.memory, MemorySection) and "attention fused" in plan.memory.assumptions[0]


@pytest.mark.parametrize("version", ["0.32.3", "0.32.2", "0.31.1"])
def test_an_older_mlx_is_refused_and_named_with_what_a_newer_one_needs(version: str) -> None:
    plan = planned(version)
    assert ", or mlx 0.32.4 or newer (" in refusals(plan)
    warnings = " ".join(issue.text for issue in plan.warnings)
    assert f"mlx {version} on m1 keeps attention's scores" in warnings and "8,192 tokens" in warnings


@pytest.mark.parametrize("version", ["0.32.4", "0.33.0", "1.0.0.dev20270101"])
def test_a_newer_mlx_is_not_warned_of(version: str) -> None:
    assert not any("scores" in issue.text for issue in planned(version).warnings)


def test_short_sequences_are_not_warned_of() -> None:
    node = mac("m1", 0, "Apple M1 Max", 32, mlx="0.32.2")
    plan = make_plan(inputs([node], settings={"batch_size": 1, "max_seq_length": 256}, model=QWEN3_8B_4BIT))
    assert not any("scores" in issue.text for issue in plan.warnings)


def test_the_switch_that_turns_it_off_is_read() -> None:
    assert "needs" in refusals(planned("0.32.4", env={"MLX_SDPA_VJP_FALLBACK": "1"}))


def test_a_cpu_and_an_unknown_version_keep_the_scores() -> None:
    for more in ({"gpu": "cpu", "mlx": "0.32.4"}, {"mlx": None}, {"system": "Linux", "mlx": "0.32.4"}):
        node = mac("m1", 0, "Apple M1 Max", 32, **more)
        assert "needs" in refusals(make_plan(inputs([node], settings=LONG, model=QWEN3_8B_4BIT))), more


def test_the_published_figures_of_one_step_are_met() -> None:
    one, tokens = 2, 8192
    attention = Sublayer((), kept=(32 + 2 * 8) * 128, scores=32, head_dim=128)
    shape = ModelShape.from_config(QWEN3_8B_4BIT)

    def step(fused: Fusing) -> float:
        """GiB, without the three arrays of the layer's width, which a step of attention alone has not."""
        ask = RankWorkload(sequence=tokens, fused_attention=fused)
        layer = Layer((attention,), 0, 0)
        needed = kept_per_token(shape, layer, ask) + working_per_token(shape, layer, ask) - 3 * shape.hidden * one
        return needed * tokens / GIB

    assert step("") == pytest.approx(12.53, rel=0.05)
    assert step("metal") == pytest.approx(0.68, rel=0.1)


def heads_of(size: int, **more: Any) -> dict[str, Any]:
    return TINY["qwen3"] | {"head_dim": size, "torch_dtype": "bfloat16", **more}


def peak(config: dict[str, Any], fused: Fusing, sequence: int = 8192) -> int:
    ask = RankWorkload(sequence=sequence, fused_attention=fused)
    return estimate(ModelShape.from_config(config), ask).peak_bytes


@pytest.mark.parametrize("size", [48, 64, 72, 80, 96, 112, 128, 192, 256, 512])
def test_it_depends_on_the_size_of_the_heads(size: int) -> None:
    fused, whole = (peak(heads_of(size), device) for device in FUSING)
    assert (fused < 0.8 * whole) is (size in FUSED_HEAD_DIMS)
    assert fused == whole or size in FUSED_HEAD_DIMS


def test_capped_scores_are_always_kept() -> None:
    config = TINY["gemma2"] | {"head_dim": 64}
    assert peak(config, "metal") == peak(config, "")


@pytest.mark.parametrize(
    "config",
    [
        TINY["llama"] | {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4096, "head_dim": 64},
        TINY["ministral3"] | {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4096, "head_dim": 64},
        TINY["exaone4"] | {"sliding_window_pattern": "LLL", "sliding_window": 4096, "head_dim": 64},
        TINY["gemma3_text"] | {"sliding_window_pattern": 6, "sliding_window": 4096, "head_dim": 64},
    ],
)
def test_a_window_shorter_than_the_sequence_is_an_array_and_keeps_the_scores(config: dict[str, Any]) -> None:
    assert peak(config, "metal") == peak(config, "")
    assert peak(config, "metal", sequence=4096) < peak(config, "", sequence=4096)


def test_of_windowed_layers_and_others_each_has_its_own_mask() -> None:
    """gemma3's pattern: of six layers the last one sees all tokens."""
    layers = ModelShape.from_config(TINY["gemma3_text"] | {"num_hidden_layers": 12}).architecture.layers
    assert [layer.sublayers[0].causal_tokens for layer in layers] == [512] * 5 + [None] + [512] * 5 + [None]


@pytest.mark.parametrize("size", [20, 32, 64, 80, 104, 128, 136, 192, 256])
def test_on_cuda_heads_of_up_to_128_in_multiples_of_8_keep_no_scores(size: int) -> None:
    fused, whole = peak(heads_of(size), "cuda"), peak(heads_of(size), "")
    assert (fused < 0.8 * whole) is (size % 8 == 0 and size <= 128)
    assert fused == whole or size in (32, 64, 80, 104, 128)


def test_on_cuda_float32_and_short_sequences_keep_the_scores() -> None:
    single = heads_of(64, torch_dtype="float32")
    assert peak(single, "cuda") == peak(single, "") and peak(single, "metal") < peak(single, "")
    assert peak(heads_of(64), "cuda", CUDA_PADDED - 1) == peak(heads_of(64), "", CUDA_PADDED - 1)
    assert peak(heads_of(64), "cuda", CUDA_PADDED) < peak(heads_of(64), "", CUDA_PADDED)
    # What the padding adds is an eighth at most.
    assert all(8 * (-length % CUDA_QUERIES) <= length for length in range(CUDA_PADDED, 5_000))


@pytest.mark.parametrize(
    ("capability", "env", "fuses"),
    [("9.0", {}, True), ("12.0", {}, True), ("7.5", {}, False), ("9.0", {"MLX_CUDA_USE_CUDNN_SDPA": "0"}, False)],
)
def test_a_plan_counts_on_cudnn_from_compute_capability_8(capability: str, env: dict[str, str], fuses: bool) -> None:
    node = cuda_node(gpus=1)
    gpus = tuple(gpu.model_copy(update={"compute_capability": capability}) for gpu in node.gpus)
    given = inputs([node.model_copy(update={"gpus": gpus})], settings=LONG, model=QWEN3_8B_4BIT, job={"env": env})
    section = make_plan(given).memory
    assert isinstance(section, MemorySection)
    assert ("attention fused" in section.assumptions[0]) is fuses


@pytest.mark.parametrize(("length", "padded"), [(999, 999), (1001, 1024), (1100, 1152), (2048, 2048), (2049, 2049)])
def test_on_cuda_a_plan_counts_what_long_inputs_are_padded_to(length: int, padded: int) -> None:
    for node, tokens in ((cuda_node(gpus=1), padded), (cpu_node(), length)):
        of_length = make_plan(inputs([node], settings={"max_seq_length": length})).memory
        assert isinstance(of_length, MemorySection)
        of_tokens = make_plan(inputs([node], settings={"max_seq_length": tokens})).memory
        assert isinstance(of_tokens, MemorySection)
        assert of_length.ranks[0].peak_bytes == of_tokens.ranks[0].peak_bytes
