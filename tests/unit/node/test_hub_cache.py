"""What the node side says of a Hugging Face cache, and which names and manifests are refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from engine.node import probes
from engine.node.hub_cache import hub_cache, login_environment
from engine.node.probes.copies import probe_copies, probe_manifest
from engine.protocol.manifest import CopyFile, HubName, copy_files, hub_name
from tests.model_copies import COMMIT, cache_files
from tests.model_files import llama_files

TINY, ROWS = HubName("model", "org/tiny"), HubName("dataset", "org/rows")
SHA = "a" * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/sh")
    return tmp_path / "hub"


def copies(*names: HubName, folders: tuple[str, ...] = ()) -> list[dict[str, object]]:
    report = probe_copies(json.dumps({"names": names, "folders": folders, "paths": []}))
    assert "problem" not in report
    listed: list[dict[str, object]] = report["copies"]
    return listed


def test_models_and_data_sets_of_the_cache_are_listed_with_what_they_lack(cache: Path) -> None:
    whole = llama_files()
    snapshot = cache_files(cache, TINY, whole)
    cache_files(cache, ROWS, {"data/train.jsonl": b'{"text": "a"}\n'})
    rows, tiny = copies()
    assert (tiny["kind"], tiny["name"], tiny["revision"], tiny["refs"]) == ("model", "org/tiny", COMMIT, ("main",))
    assert (tiny["path"], tiny["files"], tiny["missing"]) == (str(snapshot), len(whole), [])
    assert tiny["bytes"] == sum(map(len, whole.values()))
    assert (rows["kind"], rows["name"], rows["missing"]) == ("dataset", "org/rows", [])
    (snapshot / "model.safetensors").resolve().unlink()
    assert copies(TINY)[0]["missing"] == ["model.safetensors"]


def test_a_shard_of_the_index_that_is_not_there_and_one_that_is_cut_off(cache: Path) -> None:
    weights = llama_files()["model.safetensors"]
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    cache_files(cache, TINY, {**files, "model-00001-of-00002.safetensors": weights[:-10]})
    (tiny,) = copies(TINY)
    assert tiny["missing"] == ["model-00002-of-00002.safetensors"]
    assert tiny["damaged"] == ["model-00001-of-00002.safetensors"]


def test_a_revision_is_that_of_its_branch_and_else_the_newest(cache: Path) -> None:
    cache_files(cache, TINY, llama_files(), "1" * 40)
    old = cache_files(cache, TINY, llama_files(), "2" * 40)
    os.utime(old, (1, 1))
    assert [copy["revision"] for copy in copies(TINY)] == ["2" * 40, "1" * 40]
    assert [copy["revision"] for copy in copies(TINY._replace(revision="1" * 40))] == ["1" * 40]
    assert copies(TINY._replace(revision="v9")) == []


def test_folders_with_a_model_are_listed_once(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "org" / "tiny"
    folder.mkdir(parents=True)
    for name, content in llama_files().items():
        (folder / name).write_bytes(content)
    (listed,) = copies(folders=(str(tmp_path / "models" / "org"),))
    assert (listed["name"], listed["path"], listed["missing"]) == (str(folder), str(folder), [])


def test_the_cache_is_where_the_login_shell_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    (tmp_path / ".profile").write_text("echo good morning\nexport HF_HOME=/disk/hf SECRET=1\n")
    environment = login_environment()
    assert environment["HF_HOME"] == "/disk/hf"
    assert "SECRET" not in environment
    assert hub_cache(environment) == Path("/disk/hf/hub")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("model", "org/name")),
        ("org/name@v1.0", HubName("model", "org/name", "v1.0")),
        ("hf:org/set", HubName("dataset", "org/set")),
        ("hf:squad", HubName("dataset", "squad")),
        *((text, None) for text in ("name", "/org/name", "~/name", "a/b/c", "../name", "org/..", "org/a--b", "hf:")),
        ("a/b@../c", None),
    ],
)
def test_names_of_the_hub(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name


def test_how_much_was_hashed_is_reported_within_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.copies, "_REPORT_S", -1.0)
    (tmp_path / "weights").write_bytes(content := os.urandom(5 << 19))
    *reports, manifest = probe_manifest(json.dumps({"folder": str(tmp_path)}))
    assert [report["hashed"] for report in reports] == [1 << 20, 2 << 20, 5 << 19, 5 << 19]
    assert manifest["files"] == [CopyFile("weights", len(content), hashlib.sha256(content).hexdigest())]


def test_a_manifest_is_read() -> None:
    assert [tuple(file) for file in copy_files([["a/b.txt", 3, SHA]])] == [("a/b.txt", 3, SHA)]


@pytest.mark.parametrize(
    "listed",
    [
        None,
        [["../b", 3, SHA]],
        [["/b", 3, SHA]],
        [["a//b", 3, SHA]],
        [["a\\..\\b", 3, SHA]],
        [["a\n", 3, SHA]],
        [["b", -1, SHA]],
        [["b", True, SHA]],
        [["b", 3, "../../x"]],
        [["b", 3, SHA.upper()]],
        [["b", 3]],
        [["b", 3, SHA], ["B", 3, SHA]],
        [["b", 3, SHA], ["b/c", 3, SHA]],
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(listed: object) -> None:
    with pytest.raises(ValueError):
        copy_files(listed)
