"""The rows of a data set's subsets and splits, as its card declares them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.node.data_splits import source_parts
from engine.node.source_files import DataError
from tests.unit.node.data_set_cases import DATA_SETS, SELECTIONS, Selection

CARD = "---\n{}\n---\n"


def rows(folder: Path, **options: object) -> dict[str, list[int]]:
    parts = source_parts(folder, options)
    return {
        name: [int(row.values["question"]) for part in listed for _, row in part.rows(1000)]
        for name, listed in parts.items()
    }


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda selection: f"{selection.data_set}-{selection.rows}")
def test_rows_are_those_that_load_dataset_takes(tmp_path: Path, selection: Selection) -> None:
    folder = DATA_SETS[selection.data_set].write(tmp_path)
    options = {"subset": selection.subset, "splits": {"train": selection.rows}}
    if selection.numbers is None:
        with pytest.raises(DataError, match=str(tmp_path)):
            rows(folder, **options)
    else:
        assert rows(folder, **options) == {"train": selection.numbers}


def test_declared_splits_are_train_valid_and_test_by_their_names(tmp_path: Path) -> None:
    card = "configs:\n- config_name: c\n  data_files:\n  - {split: train_sft, path: a.jsonl}\n"
    card += "  - {split: validation, path: b.jsonl}\n  - {split: test, path: c.jsonl}\n"
    files = {"a.jsonl": range(3), "b.jsonl": range(3, 5), "c.jsonl": range(5, 6), "d.jsonl": range(9)}
    folder = DATA_SETS["of folders"]._replace(files=files, card=card).write(tmp_path)
    assert rows(folder) == {"train": [0, 1, 2], "valid": [3, 4], "test": [5]}


@pytest.mark.parametrize(
    ("front", "why"),
    [
        ("configs: [", "configs that cannot be read"),
        ("configs: 3", "configs that cannot be read"),
        ("configs:\n- en", "configs that cannot be read"),
        ("configs:\n- data_files: a.jsonl", "configs that cannot be read"),
        ("configs:\n- config_name: a\n  data_files: ../*.jsonl", "has no file ../"),
        ("configs:\n- config_name: a\n  data_files: /etc/passwd", "has no file /etc/passwd"),
        ("configs:\n- config_name: a\n  data_files: 'https://example.org/a.jsonl'", "has no file https"),
        ("configs:\n- config_name: a\n  data_files: [{path: a.jsonl, split: [x]}, 3, null]", "has no file 3"),
        ("configs:\n- config_name: a\n  data_dir: ../..", "data_dir"),
        ("configs:\n- config_name: a\n  data_dir: [a]", "data_dir"),
    ],
)
def test_a_card_that_declares_what_cannot_be_read_is_refused_in_a_line(tmp_path: Path, front: str, why: str) -> None:
    (tmp_path / "README.md").write_text(CARD.format(front))
    (tmp_path / "a.jsonl").write_text('{"question": "1", "answer": "a"}\n')
    with pytest.raises(DataError, match=why) as refused:
        source_parts(tmp_path, {})
    assert "\n" not in str(refused.value)


def test_without_pyyaml_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DATA_SETS["of folders"].write(tmp_path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(DataError, match=f"PyYAML is missing: `uv pip install --python {sys.executable} pyyaml`"):
        source_parts(folder, {"subset": "main"})


@pytest.mark.parametrize("suffix", ["png", "md", "json"])
def test_a_folder_that_is_a_whole_disk_is_refused_before_all_of_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("engine.node.data_splits._MOST_FILES", 4)
    for name in ("a/1", "a/2", "b/3", "b/4", "c/5", "d/6"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.{suffix}").touch()
    (tmp_path / "a/rows.jsonl").touch()
    with pytest.raises(DataError, match=f"has more than 4 files, {tmp_path}/b among them"):
        source_parts(tmp_path, {})
    assert tmp_path / "a/rows.jsonl" in source_parts(tmp_path / "a", {})["train"][0].files


def test_rows_beside_very_many_images_are_read(tmp_path: Path) -> None:
    for number in range(10_001):
        (tmp_path / f"{number}.jpg").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train-00000.parquet").touch()
    assert source_parts(tmp_path, {})["train"][0].files == [tmp_path / "data/train-00000.parquet"]
