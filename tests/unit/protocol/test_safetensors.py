"""Headers that lie are refused before MLX reads them."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.safetensors import CheckpointError, check_header


def written(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_what_mlx_writes_is_read(tmp_path: Path) -> None:
    arrays = {"a": mx.zeros((2, 3), dtype=mx.bfloat16), "b": mx.zeros((5,), dtype=mx.uint32), "c": mx.array(1.0)}
    mx.save_safetensors(str(tmp_path / "x.safetensors"), arrays, {"k": "v"})
    header = check_header(tmp_path / "x.safetensors")
    assert header.tensors == {"a": ("BF16", (2, 3)), "b": ("U32", (5,)), "c": ("F32", ())}
    assert header.metadata == {"k": "v"}


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": 7},
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        {"a": {"dtype": "F32", "shape": [2**61, 8], "data_offsets": [0, 4]}},
        {"__metadata__": [1], "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        [],
        b"{",
        b"[" * 10_000,
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(CheckpointError):
        check_header(written(tmp_path / "x.safetensors", header, b"1234"))


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CheckpointError, match="longer than the file"):
        check_header(path)
    path.write_bytes(b"123")
    with pytest.raises(CheckpointError, match="no safetensors header"):
        check_header(path)


@given(raw=st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        check_header(path)
