"""Says for a node that MLX computes attention's gradient from tiles of the scores itself, or why it does not, and what
is done instead."""

from __future__ import annotations

from collections.abc import Mapping

from engine.models import NodeFacts
from engine.plan.memory.architecture import Sublayer
from engine.plan.memory.estimate import RankWorkload, is_fused, is_tiled
from engine.plan.memory.shape import ModelShape
from engine.protocol.partition import CUDA_PADDED, FUSED_HEAD_DIMS, FUSED_SINCE, version_numbers

_NAMES = {"metal": "Metal", "cuda": "cuDNN"}


def attention_text(
    shape: ModelShape, workload: RankWorkload, facts: NodeFacts | None, environment: Mapping[str, str]
) -> str:
    """A sentence on each kind of attention that the model has; "" where it has none."""
    sublayers = dict.fromkeys(part for layer in shape.architecture.layers for part in layer.sublayers if part.scores)
    texts = (_text(part, workload, shape.dtype_bytes, facts, environment) for part in sublayers if part.window is None)
    return "; ".join(dict.fromkeys(texts))


def _text(
    part: Sublayer, workload: RankWorkload, one: int, facts: NodeFacts | None, environment: Mapping[str, str]
) -> str:
    window = f" with a window of {part.causal_tokens:,} tokens" if part.causal_tokens is not None else ""
    if is_fused(part, workload, one):
        by = _NAMES[workload.fused_attention]
        return f"attention{window}: MLX's own gradient from tiles of the scores is used ({by})"
    tokens = workload.sequence_tiling
    done = f"computed in tiles of {tokens:,} queries" if is_tiled(part, workload, one) else "all scores are kept"
    why = _of_model(part, workload, one) if workload.fused_attention else _of_node(facts, environment)
    return f"attention{window}: {done}; MLX's own gradient from tiles is not used: {why}"


def _of_node(facts: NodeFacts | None, environment: Mapping[str, str]) -> str:
    if facts is None or facts.mlx is None:
        return "the node's mlx is not known"
    if facts.gpu != "gpu":
        return "it is for GPUs"
    if facts.mlx_device == "CUDA":
        off = environment.get("MLX_CUDA_USE_CUDNN_SDPA", "1") == "0"
        return "MLX_CUDA_USE_CUDNN_SDPA = 0 in [job] env" if off else "it needs a GPU of compute capability 8 or more"
    if version_numbers(facts.mlx) < FUSED_SINCE:
        return f"mlx {facts.mlx} is older than {'.'.join(map(str, FUSED_SINCE))}"
    return "MLX_SDPA_VJP_FALLBACK is set in [job] env"


def _of_model(part: Sublayer, workload: RankWorkload, one: int) -> str:
    if part.head_dim is None:
        return "the model changes the scores"
    if part.causal_tokens is not None and workload.sequence > part.causal_tokens:
        return "the window's mask is an array"
    if workload.fused_attention == "metal":
        return f"heads have {part.head_dim} elements, not one of {', '.join(map(str, sorted(FUSED_HEAD_DIMS)))}"
    if one != 2:
        return "it is for 16 bits"
    if workload.sequence < CUDA_PADDED:
        return f"sequences have fewer than {CUDA_PADDED:,} tokens"
    return f"heads have {part.head_dim} elements, not a multiple of 8 up to 128"
