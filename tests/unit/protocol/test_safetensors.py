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

from engine.protocol.safetensors import CheckpointError, check_header, misfit


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


MODEL = {"model.layers.0.q.weight": (4, 4), "model.layers.0.q.lora_a": (4, 2), "model.layers.0.q.lora_b": (2, 4)}
TRAINED = {"model.layers.0.q.lora_a", "model.layers.0.q.lora_b"}
shapes = st.dictionaries(st.sampled_from([*MODEL, "other", "layers.0.q.lora_a"]), st.sampled_from([(4, 4), (4, 2)]))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "it has no tensor"),
        ({"vlm.model.layers.0.q.lora_a": (4, 2)}, "job trains model.layers.0.q.lora_a; save it anew with the job's pr"),
        ({"layers.0.q.lora_a": (4, 2)}, "job trains model.layers.0.q.lora_a; save it anew with the job's prefix"),
        ({"else": (1,)}, "none of its 1 tensors is one of the job's: it has 'else', and the job trains model."),
        ({"else": (1,), **MODEL}, "1 of its 4 tensors are none of the job's, such as 'else'"),
        ({"model.layers.0.q.lora_a": (4, 3)}, "its model.layers.0.q.lora_a is [4, 3], and the job's [4, 2]"),
        ({"model.layers.0.q.lora_a": (4, 2)}, None),
        (MODEL, None),
    ],
)
def test_weights_that_fit_nowhere_are_described(found: dict[str, tuple[int, ...]], message: str | None) -> None:
    described = misfit(found, MODEL, TRAINED)
    assert (described is None) if message is None else message in (described or "")


@given(shapes)
def test_weights_fit_if_all_of_them_have_a_place(found: dict[str, tuple[int, ...]]) -> None:
    fit = bool(found) and all(MODEL.get(name) == shape for name, shape in found.items())
    assert (misfit(found, MODEL, TRAINED) is None) == fit
