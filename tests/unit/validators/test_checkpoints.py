"""Checkpoints are judged by their own bytes: whole, and of one version, which they say themselves or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import validate_checkpoint_consistency, validate_checkpoint_layer
from engine.trainer.checkpoint import store
from engine.training.checkpoint_files import Origin


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, below which paths are allowed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tensors(version: str | None = None, **more: Any) -> bytes:
    header: dict[str, Any] = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
        **more,
    }
    if version is not None:
        header["__metadata__"] = {"version": version}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(22)


def saved(path: Path, version: str | None = None) -> str:
    path.write_bytes(tensors(version))
    return str(path)


def test_what_mlx_saves_is_whole_and_says_no_version(here: Path) -> None:
    mx.save_safetensors(str(here / "m.safetensors"), {"w": mx.ones((3, 5)), "h": mx.ones(2, dtype=mx.bfloat16)})
    mx.save_safetensors(str(here / "v.safetensors"), {"w": mx.ones(1)}, metadata={"version": "7"})
    assert validate_checkpoint_consistency([here / "m.safetensors"])
    assert validate_checkpoint_consistency([here / "v.safetensors"], 7)
    assert not validate_checkpoint_consistency([here / "m.safetensors"], 7)
    assert not validate_checkpoint_consistency([here / "m.safetensors", here / "v.safetensors"])


@pytest.mark.parametrize(
    ("versions", "expected", "good"),
    [
        ((None, None), None, True),
        (("3", "3"), None, True),
        (("3", "3"), "3", True),
        (("3", "3"), 3, True),
        (("3", "3"), 4, False),
        (("3", "4"), None, False),
        (("3", None), None, False),
    ],
)
def test_versions_must_be_the_same(
    here: Path, versions: tuple[str | None, ...], expected: int | str | None, good: bool
) -> None:
    paths = [saved(here / f"{at}.safetensors", version) for at, version in enumerate(versions)]
    assert validate_checkpoint_consistency(paths, expected) is good
    report = validate_checkpoint_layer(paths, expected)
    assert (report.version_consistency, report.is_valid, report.missing_files, report.corrupted_files) == (
        good,
        good,
        (),
        (),
    )


@pytest.mark.parametrize("paths", [[], None, "a.safetensors", Path("a.safetensors")])
def test_no_list_of_paths_is_an_error(paths: Any) -> None:
    with pytest.raises(ValueError):
        validate_checkpoint_consistency(paths)


@pytest.mark.parametrize("path", ["../x.safetensors", "a\0b", "", "x" * 5000, "/etc/passwd", "-rf", "$HOME/x"])
def test_a_path_that_must_not_be_read_is_an_error(path: str) -> None:
    for judge in (validate_checkpoint_consistency, validate_checkpoint_layer):
        with pytest.raises(ValueError):
            judge([path])


def test_a_symlink_that_leads_away_is_an_error(here: Path) -> None:
    (here / "away").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="symlink"):
        validate_checkpoint_consistency([here / "away"])


def test_what_is_missing_and_what_is_corrupted_are_named_apart(here: Path) -> None:
    good, bad = saved(here / "good.safetensors"), here / "bad.safetensors"
    bad.write_bytes(tensors()[:-1])
    report = validate_checkpoint_layer([good, str(bad), "gone.safetensors"])
    assert report.missing_files == ("gone.safetensors",)
    assert report.corrupted_files == (str(bad),)
    assert report.integrity_checks == {good: True, str(bad): False, "gone.safetensors": False}
    assert "need 22 bytes, it has 21" in report.problems[str(bad)]
    assert not report.is_valid and report.version_consistency


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        bytes(8),
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        tensors(c={"dtype": "F32", "shape": [1], "data_offsets": [22, 25]}),
        tensors(c={"dtype": "F99", "shape": [1], "data_offsets": [22, 26]}),
        tensors(c={"dtype": "F32", "shape": [-1], "data_offsets": [22, 18]}),
        tensors(c={"dtype": "U8", "shape": [4], "data_offsets": [10, 14]}),
        tensors(c="no table"),
        tensors(c={"dtype": ["U8"], "shape": None, "data_offsets": [1]}),
        tensors(__metadata__=[1]),
        tensors() + b"x",
    ],
)
def test_a_torn_or_forged_file_is_corrupt(here: Path, data: bytes) -> None:
    (here / "x.safetensors").write_bytes(data)
    assert validate_checkpoint_layer(["x.safetensors"]).corrupted_files == ("x.safetensors",)
    assert not validate_checkpoint_consistency(["x.safetensors"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(tensors("1")) - 1))
def test_a_file_cut_anywhere_is_corrupt(here: Path, length: int) -> None:
    (here / "cut.safetensors").write_bytes(tensors("1")[:length])
    assert not validate_checkpoint_consistency(["cut.safetensors"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_give_a_report_and_never_raise(here: Path, data: bytes) -> None:
    for name in ("any.safetensors", "any.json"):
        (here / name).write_bytes(data)
        assert validate_checkpoint_layer([name]).integrity_checks.keys() == {name}


def test_a_manifest_says_version_and_hashes(here: Path) -> None:
    step = here / "step-100"
    step.mkdir()
    (step / "weights.safetensors").write_bytes(b"bytes")
    manifest = {"version": 100, "files": {"weights.safetensors": hashlib.sha256(b"bytes").hexdigest()}}
    (step / "manifest.json").write_text(json.dumps(manifest))
    assert validate_checkpoint_consistency([step], 100)
    assert validate_checkpoint_consistency([step / "manifest.json", saved(here / "a.safetensors", "100")])
    (step / "weights.safetensors").write_bytes(b"bytez")
    assert "does not have the SHA-256" in validate_checkpoint_layer([step]).problems[str(step)]
    (step / "weights.safetensors").unlink()
    assert not validate_checkpoint_consistency([step])
    (step / "manifest.json").unlink()
    assert validate_checkpoint_layer([step]).missing_files == (str(step),)


def test_a_checkpoint_of_the_trainer_is_understood(here: Path) -> None:
    """Its version is its update."""
    arrays = {"weights": {"w": mx.ones((3, 5))}}
    mx.eval(arrays)
    origin = Origin("c", world_size=2, part=0, parts=1, inputs={})
    path = store.write(here / "checkpoints", store.Snapshot(80, 40, {}, arrays), origin).path
    assert validate_checkpoint_consistency([path], 40) and not validate_checkpoint_consistency([path], 41)
    with (path / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    assert "does not have the SHA-256" in validate_checkpoint_layer([path]).problems[str(path)]
    (path / "manifest.json").write_text('{"format": 3, "update": 40, "files": [["x"]]}')
    assert "list of files is malformed" in validate_checkpoint_layer([path]).problems[str(path)]


@pytest.mark.parametrize("manifest", [{}, {"version": 1}, {"version": 1, "files": {}}, {"format": 4, "files": []}])
def test_a_manifest_without_files_is_no_checkpoint(here: Path, manifest: dict[str, object]) -> None:
    (here / "manifest.json").write_text(json.dumps(manifest))
    problem = validate_checkpoint_layer(["manifest.json"]).problems["manifest.json"]
    assert "files must be a table" in problem or "its list of files is malformed" in problem


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", ".."])
def test_a_manifest_names_only_what_lies_beside_it(here: Path, name: str) -> None:
    (here / "manifest.json").write_text(json.dumps({"version": 1, "files": {name: "0" * 64}}))
    report = validate_checkpoint_layer(["manifest.json"])
    assert "not a file beside it" in report.problems["manifest.json"]
