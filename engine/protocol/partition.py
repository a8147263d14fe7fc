"""How a dataset is cut into chunks, a global batch into the ranks' shares, its loss into chunks of tokens, and a model
into the stages of a pipeline, with their 1F1B schedule: the same arithmetic for plan and trainer."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

COORDINATOR_CHUNK_SIZE = 50_000
"""Examples per chunk, and the smallest dataset that is chunked."""


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a dataset; examples and chunks count from 0, ranges are half-open."""

    enabled: bool
    """The dataset is streamed; else it is one piece in memory."""
    dataset_size: int
    """Examples."""
    chunk_size: int
    """Examples per chunk; the last one may have fewer."""
    num_chunks: int
    """ceil(dataset_size / chunk_size)."""

    @classmethod
    def whole(cls, dataset_size: int) -> ChunkPlan:
        """One piece in memory, perhaps empty."""
        return cls(False, dataset_size, dataset_size, 1)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The range of examples of `chunk`. Raises IndexError."""
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"chunk {chunk} of {self.num_chunks}")
        start = chunk * self.chunk_size
        return start, min(start + self.chunk_size, self.dataset_size)


def chunk_plan(dataset_size: int, chunk_size: int = COORDINATOR_CHUNK_SIZE) -> ChunkPlan:
    """The plan for `dataset_size` examples: chunked if there are `chunk_size` or more. Raises ValueError for a size
    that is not an integer of at least 1."""
    for name, value in (("dataset_size", dataset_size), ("chunk_size", chunk_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")
    num_chunks = -(-dataset_size // chunk_size)
    return ChunkPlan(dataset_size >= chunk_size, dataset_size, chunk_size, num_chunks)


def epoch_iterations(epochs: float, batches: int) -> int:
    """Iterations that make `epochs` of so many batches, to the nearest whole number, at least 1."""
    return max(1, round(epochs * batches))


def progress_text(chunk: int, num_chunks: int) -> str:
    """The progress line after the `chunk`-th of `num_chunks` chunks, from 1. Raises ValueError for a chunk out of
    range."""
    if not 1 <= chunk <= num_chunks:
        raise ValueError(f"chunk {chunk} of {num_chunks}")
    return f"Processing chunk {chunk}/{num_chunks} ({100 * chunk // num_chunks}% complete)"


def share_counts(total: int, shares: Sequence[float]) -> list[int]:
    """`total` examples divided over ranks in proportion to `shares`, by largest remainder (Hamilton's method), at least
    1 each. Raises ValueError for a share that is not above 0, or fewer examples than ranks."""
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"shares must be above 0: {list(shares)}")
    if total < len(shares):
        raise ValueError(f"a batch of {total} is too small for {len(shares)} ranks: batch_size must be at least that")
    whole = sum(shares)
    quotas = [total * share / whole for share in shares]
    counts = [max(1, int(quota)) for quota in quotas]
    while sum(counts) < total:
        counts[max(range(len(counts)), key=lambda rank: (quotas[rank] - counts[rank], -rank))] += 1
    while sum(counts) > total:
        able = [rank for rank in range(len(counts)) if counts[rank] > 1]
        counts[max(able, key=lambda rank: (counts[rank] - quotas[rank], rank))] -= 1
    return counts


def share_counts_among(total: int, shares: Sequence[float], taking_part: Sequence[bool] | None) -> list[int]:
    """As `share_counts`, over the ranks that are `taking_part`, one at least (None: all); 0 for the others. Raises
    ValueError as it does."""
    parts = taking_part if taking_part is not None else [True] * len(shares)
    wanted = [share for share, part in zip(shares, parts) if part]  # noqa: B905  (Python 3.9)
    counts = iter(share_counts(total, wanted))
    return [next(counts) if part else 0 for part in parts]


def share_slice(length: int, counts: Sequence[int], rank: int) -> slice:
    """The rank's slice of a batch of `length`, which may be less than the counts' sum (the last one of a
    validation)."""
    start = sum(counts[:rank])
    return slice(min(start, length), min(start + counts[rank], length))


def padded_width(length: int) -> int:
    """The width to which a sequence of `length` tokens, 1 or more, is padded: the next multiple of 4 up to 128, then of
    1/16 of the power of two below, so that from 48 tokens at most 6.25 % is added. mx.compile keeps a variant for each
    width, and never drops one: up to 32,768 tokens there are 160."""
    step = max(4, (1 << (length - 1).bit_length()) // 32)
    return -(-length // step) * step


def input_width(tokens: int, max_length: int) -> int:
    """Inputs to which a batch is padded whose longest example has so many tokens: all but the last one are inputs."""
    return min(padded_width(max(tokens - 1, 1)), max(max_length - 1, 1))


def budget_edges(lengths: Sequence[int], budget: int, max_length: int) -> list[int]:
    """Where examples in order of their tokens (`lengths`), the longest first, are cut into batches of at most `budget`
    padded inputs, or of one example: each width has one number of rows, which bounds the shapes that are compiled."""
    edges = [0]
    while edges[-1] < len(lengths):
        rows = max(1, budget // input_width(int(lengths[edges[-1]]), max_length))
        edges.append(min(len(lengths), edges[-1] + rows))
    return edges


def token_edges(widths: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Where the rows of a batch, the widest first, are cut into a part for each rank, perhaps none, each padded to its
    own first one, so that the most padded inputs in proportion to a rank's share (0 or more) are the fewest."""

    def edges(limit: float) -> list[int]:
        ends = [0]
        for share in shares:
            start = ends[-1]
            rows = int(limit * share / widths[start]) if start < len(widths) else 0
            ends.append(min(len(widths), start + rows))
        return ends

    low, high = 0.0, 2.0 * len(widths) * widths[0] / max(shares)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if edges(middle)[-1] == len(widths) else (middle, high)
    return edges(high)


def cuda_width(inputs: int) -> int:
    """On CUDA MLX 0.32.4 differentiates attention by cuDNN for multiples of 128 tokens alone: inputs of 1000 tokens or
    more are padded to one, which adds an eighth at most."""
    return -(-inputs // CUDA_QUERIES) * CUDA_QUERIES if inputs >= CUDA_PADDED else inputs


CUDA_QUERIES, CUDA_PADDED = 128, 1000
Fusing = Literal["", "metal", "cuda"]
"""The device whose MLX computes attention's gradient from tiles of the scores; "" where none does."""
FUSED_SINCE = (0, 32, 4)
"""The first MLX with attention's gradient in tiles on Metal: libmlx 0.32.3 lacks it."""
FUSED_HEAD_DIMS = frozenset({64, 72, 80, 96, 128, 192, 256})
"""Sizes of heads whose attention MLX differentiates on Metal in tiles: more than 8 tokens, a mask that is none or
"causal", no sinks, and any type (ScaledDotProductAttention::use_fallback with a logsumexp, libmlx 0.32.4). On CUDA 16
bits, and up to 128 in multiples of 8."""


def version_numbers(version: str | None) -> tuple[int, ...]:
    """(0, 32, 4) of "0.32.4.dev1"; () if it is not known, which is before all."""
    return tuple(map(int, re.findall(r"[0-9]{1,6}", version or "")[:3]))


def fusing_device(device: str, mlx: str | None, environment: Mapping[str, str], capability: tuple[int, ...]) -> Fusing:
    """`device`: "CUDA", or another GPU; `mlx`: its version; `capability`: the CUDA GPU's."""
    if device == "CUDA":
        return "cuda" if capability >= (8,) and environment.get("MLX_CUDA_USE_CUDNN_SDPA", "1") != "0" else ""
    fuses = version_numbers(mlx) >= FUSED_SINCE and environment.get("MLX_SDPA_VJP_FALLBACK", "0") == "0"
    return "metal" if fuses else ""


def fuses_attention(device: Fusing, head_dim: int | None, tokens: int, element_bytes: int) -> bool:
    """MLX computes the gradient of an attention with this size of heads, and a mask that is none or "causal", from
    tiles."""
    if device == "cuda":
        return element_bytes == 2 and head_dim in range(8, 129, 8) and tokens >= CUDA_PADDED
    return device == "metal" and head_dim in FUSED_HEAD_DIMS


_LOGIT_BYTES = 128 * 2**20
"""Limit of one array of a chunk's logits, in float32. With 64 tokens and more a GPU computes longer than it reads the
head's weights, and there are several such arrays."""
_TILE = 64
"""Rows of the largest tile of Metal's matrix product."""


def loss_tokens(tokens: int, vocabulary: int) -> int:
    """Tokens of a batch of `tokens` whose logits are in memory at once: all where they take 128 MiB in float32 or less,
    else a multiple of 64 such that the chunks are about equal."""
    most = _LOGIT_BYTES // (4 * vocabulary)
    if tokens <= most:
        return tokens
    most = max(_TILE, most // _TILE * _TILE)
    even = -(-tokens // -(-tokens // most))
    return min(tokens, -(-even // _TILE) * _TILE)


LayerSplit = tuple[tuple[int, int], ...]
"""Each rank's layers as a half-open range."""
SPLITTABLE_MODULES = ("llama", "ministral3", "mistral3", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Modules of mlx_lm.models with embeddings, equal layers, a norm and a head, which accept embeddings instead of tokens:
their layers can be on several ranks."""
_KNOWN_AS = {"mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "llava": "mistral3"}
"""model_type of a config.json → mlx-lm's module, where they differ (mlx_lm.utils.MODEL_REMAPPING)."""
_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")


def mlx_module(model_type: str) -> str:
    """mlx-lm's module for a config.json's `model_type`."""
    return _KNOWN_AS.get(model_type, model_type)


def layer_split(layers: int, memory: Sequence[float], most: Sequence[int | None] | None = None) -> LayerSplit:
    """Each rank's layers in proportion to its memory (any unit), half-open ranges, in rank order. Starting with the
    weakest, each rank gets its proportion of the remaining layers, rounded up, but no more than an even part of them
    and its entry in `most` (None: no limit); the strongest gets the rest. So 36 layers over 128:512 are 7.2:28.8, and
    0-8, 8-36; a weaker rank never gets more than a stronger one. Raises ValueError for fewer layers than ranks, a
    memory that is not above 0, and limits that leave layers over."""
    ranks = len(memory)
    limits = [math.inf if limit is None else limit for limit in most or [None] * ranks]
    if not ranks or len(limits) != ranks:
        raise ValueError("memory and most are per rank")
    if layers < ranks:
        raise ValueError(f"{layers} layers are too few for {ranks} stages")
    if not all(0 < size < math.inf for size in memory):
        raise ValueError(f"memory must be above 0: {list(memory)}")
    counts = [0] * ranks
    order = sorted(range(ranks), key=lambda rank: (memory[rank], limits[rank]))
    left, left_memory, last = layers, float(sum(memory)), 1
    for index, rank in enumerate(order):
        ranks_left = ranks - index
        even = left // ranks_left
        proportion = math.ceil(left * memory[rank] / left_memory - 1e-9)
        wanted = left if ranks_left == 1 else max(last, min(proportion, even))
        counts[rank] = last = int(min(wanted, limits[rank]))
        left, left_memory = left - counts[rank], left_memory - memory[rank]
    if left:
        raise ValueError(f"{left} of {layers} layers are left over: {_counts_text(counts, limits)}")
    pairs = [(order[index], order[index + 1]) for index in range(ranks - 1)]
    if any(memory[weak] < memory[strong] and counts[weak] > counts[strong] for weak, strong in pairs):
        raise ValueError(f"a stronger rank may take fewer layers than a weaker one: {_counts_text(counts, limits)}")
    ends = [sum(counts[: rank + 1]) for rank in range(ranks)]
    return tuple((end - counts[rank], end) for rank, end in enumerate(ends))


def split_by_bytes(layers: Sequence[int], ends: tuple[int, int], memory: Sequence[float]) -> LayerSplit:
    """The stages' layers such that the largest proportion of bytes to memory is the least. `layers`: bytes of each;
    `ends`: bytes that the first and the last stage have besides; `memory`: of each stage, any unit. Raises ValueError
    for fewer layers than stages."""
    count, stages = len(layers), len(memory)
    if count < stages:
        raise ValueError(f"{count} layers are too few for {stages} stages")
    sums = [0, *itertools.accumulate(layers)]

    @functools.cache
    def best(stage: int, start: int) -> tuple[float, float, LayerSplit]:
        """The largest proportion, the sum of their squares, and the ranges, from `stage` on."""
        final = stage == stages - 1
        options = []
        for end in (count,) if final else range(start + 1, count - (stages - stage) + 2):
            size = sums[end] - sums[start] + (ends[0] if stage == 0 else 0) + (ends[1] if final else 0)
            largest, squares, rest = (0.0, 0.0, ()) if final else best(stage + 1, end)
            load = size / memory[stage]
            options.append((max(load, largest), load**2 + squares, ((start, end), *rest)))
        return min(options)

    return best(0, 0)[2]


def format_split(split: LayerSplit) -> str:
    """ "0-8,8-36"."""
    return ",".join(f"{start}-{end}" for start, end in split)


def parse_split(text: str) -> LayerSplit:
    """The ranges of a text such as "0-8,8-36". Raises ValueError unless they start at 0, are not empty, and are
    contiguous."""
    ranges = []
    for part in text.replace(" ", "").split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None:
            raise ValueError(f'{part!r} is not a range of layers; accepted: one per rank, such as "0-8,8-36"')
        ranges.append((int(matched[1]), int(matched[2])))
    reached = 0
    for start, end in ranges:
        if start != reached or end <= start:
            raise ValueError(f"{start}-{end} does not continue at layer {reached} with at least one layer")
        reached = end
    return tuple(ranges)


def check_split(split: LayerSplit, layers: int, ranks: int) -> None:
    """Raises ValueError unless `split` divides `layers` over `ranks`."""
    if len(split) != ranks:
        raise ValueError(f"it has {len(split)} ranges for {ranks} ranks")
    if split[-1][1] != layers:
        raise ValueError(f"it ends at layer {split[-1][1]}, and the model has {layers}")


def _counts_text(counts: Sequence[int], limits: Sequence[float]) -> str:
    bounds = ["" if limit == math.inf else f" (at most {limit})" for limit in limits]
    return ", ".join(f"rank {rank} takes {count}{bounds[rank]}" for rank, count in enumerate(counts))


Action = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward"]
_MICRO_BATCHES_PER_STAGE = 2


@dataclass(frozen=True)
class Step:
    act: Action
    micro: int
    """The micro-batch, from 0."""


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """The fraction of a step that a stage of a 1F1B pipeline waits: (p-1)/(m+p-1), 0 to below 1. Source: Narayanan et
    al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters. Raises ValueError for counts below 1."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"stages and micro-batches must be at least 1: {stages}, {micro_batches}")
    return (stages - 1) / (micro_batches + stages - 1)


def micro_batches(rows: int, stages: int) -> int:
    """Micro-batches of a batch of `rows`: two per stage, as far as there are rows. More would shorten the wait at its
    ends ((p-1)/(m+p-1) of a step), but also make each matrix product smaller."""
    return max(1, min(rows, _MICRO_BATCHES_PER_STAGE * stages))


def schedule(stage: int, stages: int, micro: int, first_trained: int = 0) -> list[Step]:
    """The actions of `stage` of `stages` for `micro` micro-batches, in order: one forward, one backward (1F1B, see
    `bubble_fraction`), so that a stage holds the activations of at most `stages - stage` micro-batches. Of two
    neighbours that send to each other, one receives first, so that no message needs a buffer. The stages before
    `first_trained` have nothing to train, and only go forward."""
    warm = min(stages - stage - 1, micro)
    steps: list[Step] = []

    def both(send: Step, receive: Step) -> list[Step]:
        return [send, receive] if stage % 2 == 0 else [receive, send]

    for number in range(warm):
        steps += [Step("receive_forward", number), Step("forward", number), Step("send_forward", number)]
    for number in range(micro - warm):
        ahead = warm + number
        if number == 0:
            steps.append(Step("receive_forward", ahead))
        steps.append(Step("forward", ahead))
        steps += both(Step("send_forward", ahead), Step("receive_backward", number))
        steps.append(Step("backward", number))
        if ahead + 1 < micro:
            steps += both(Step("send_backward", number), Step("receive_forward", ahead + 1))
        else:
            steps.append(Step("send_backward", number))
    for number in range(micro - warm, micro):
        steps += [Step("receive_backward", number), Step("backward", number), Step("send_backward", number)]
    absent: set[Action] = set()
    if stage == 0:
        absent |= {"receive_forward", "send_backward"}
    if stage == stages - 1:
        absent |= {"send_forward", "receive_backward"}
    if stage < first_trained:
        absent |= {"receive_backward", "backward"}
    if stage <= first_trained:
        absent |= {"send_backward"}
    return [step for step in steps if step.act not in absent]
