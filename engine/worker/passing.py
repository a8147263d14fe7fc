"""Passing things from one rank to all others, bit by bit, over the sums that every backend has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from .collective import Collective

_BUCKET_BYTES = 64 * 2**20
_ALIGNED = 8
"""Bytes: no element of any type lies across what is cut."""
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        mx.float32, mx.bfloat16, mx.float16, mx.uint8, mx.uint16, mx.uint32, mx.uint64,
        mx.int8, mx.int16, mx.int32, mx.int64,
    )
}  # fmt: skip

Groups = Mapping[str, Mapping[str, mx.array]]


def gather_facts(collective: Collective, facts: Any) -> list[Any]:
    """Everybody's `facts` (what JSON can say), by rank. Raises PeerLost."""
    raw = json.dumps(facts).encode()
    lengths = [row[0] for row in collective.gather([len(raw)])]
    words = -(-max(lengths) // 4)
    padded = raw.ljust(words * 4, b"\0")
    rows = collective.gather(np.frombuffer(padded, dtype="<u4").tolist())
    return [
        json.loads(np.asarray(row, dtype="<u4").tobytes()[:length]) for row, length in zip(rows, lengths, strict=True)
    ]


def pass_facts(collective: Collective, facts: Any, owner: int) -> Any:
    """`facts` of rank `owner` (what JSON can say), on every rank. Raises PeerLost."""
    return gather_facts(collective, facts if collective.rank == owner else None)[owner]


def pass_arrays(collective: Collective, groups: Groups | None, owner: int) -> dict[str, dict[str, mx.array]]:
    """The `groups` of rank `owner`, to the bit, on every rank; the others give None. Raises PeerLost."""
    mine = groups if collective.rank == owner else None
    described = pass_facts(collective, _described(mine or {}), owner)
    shapes = [
        (group, name, tuple(shape), _DTYPES[dtype])
        for group, arrays in described.items()
        for name, (shape, dtype) in arrays.items()
    ]
    found: dict[str, dict[str, mx.array]] = {group: {} for group in described}
    for bucket in _buckets(shapes):
        sizes = [_padded(shape, dtype) for _, _, shape, dtype in bucket]
        # As whole numbers: a sum of floats with zeros would make 0.0 of -0.0.
        if mine is None:
            bits = mx.zeros(sum(sizes) // 4, dtype=mx.uint32)
        else:
            bits = mx.concatenate([_bits(mine[group][name]) for group, name, _, _ in bucket])
        total = (collective.sum(bits) if bits.size else bits).view(mx.uint8)
        if mine is not None:
            # Its own: there is no room for two states.
            for group, name, _, _ in bucket:
                found[group][name] = mine[group][name]
            continue
        start = 0
        for (group, name, shape, dtype), size in zip(bucket, sizes, strict=True):
            length = int(np.prod(shape)) * dtype.size
            # A copy: a slice would keep its whole bucket.
            piece = mx.contiguous(total[start : start + length])
            mx.eval(piece)
            found[group][name] = piece.view(dtype).reshape(shape)
            start += size
        mx.eval(found)
    return found


def _described(groups: Groups) -> dict[str, dict[str, tuple[tuple[int, ...], str]]]:
    return {
        group: {name: (value.shape, str(value.dtype)) for name, value in arrays.items()}
        for group, arrays in groups.items()
    }


_Entry = tuple[str, str, tuple[int, ...], mx.Dtype]


def _buckets(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """In order, as many as fit into a bucket: hundreds of small sums would take longer than one large one."""
    bucket: list[_Entry] = []
    room = _BUCKET_BYTES
    for entry in entries:
        size = _padded(entry[2], entry[3])
        if bucket and size > room:
            yield bucket
            bucket, room = [], _BUCKET_BYTES
        bucket.append(entry)
        room -= size
    if bucket:
        yield bucket


def _padded(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    return -(-int(np.prod(shape)) * dtype.size // _ALIGNED) * _ALIGNED


def _bits(value: mx.array) -> mx.array:
    """Its bytes as 32-bit words, filled up."""
    raw = mx.contiguous(value).reshape(-1).view(mx.uint8)
    return mx.pad(raw, (0, _padded(value.shape, value.dtype) - raw.size)).view(mx.uint32)
