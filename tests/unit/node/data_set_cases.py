"""Data sets as they lie on the Hugging Face Hub, with what its load_dataset takes of each as train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class DataSet(NamedTuple):
    files: Mapping[str, range]
    """Name → the numbers of its rows."""
    card: str
    """The front matter of README.md."""

    def write(self, folder: Path) -> Path:
        for name, numbers in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps({"question": str(row), "answer": "a"}) + "\n" for row in numbers))
        (folder / "README.md").write_text(f"---\nlicense: mit\n{self.card}---\n# A set\n\n---\nconfigs: no\n")
        return folder


class Selection(NamedTuple):
    data_set: str
    subset: str | None
    rows: str
    """The split and its slice."""
    numbers: list[int] | None
    """None: refused."""


DATA_SETS = {
    "of one subset": DataSet(
        {"data/train-00000-of-00002.jsonl": range(5), "data/train-00001-of-00002.jsonl": range(5, 10),
         "data/held_out.jsonl": range(20, 22), "extra/more.jsonl": range(90, 99)},
        "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
        "  - split: held_out\n    path:\n    - data/held_out.jsonl\n",
    ),
    "of subsets in files": DataSet(
        {"en.jsonl": range(5), "fr.jsonl": range(5, 10)},
        "configs:\n- config_name: en\n  data_files: en.jsonl\n- config_name: fr\n  data_files: [fr.jsonl]\n",
    ),
    "with a default": DataSet(
        {"en/a.jsonl": range(5), "en/deep/b.jsonl": range(5, 7), "fr/a.jsonl": range(10, 15)},
        "configs:\n- config_name: fr\n  data_files: fr/*.jsonl\n"
        "- config_name: en\n  default: true\n  data_files: ./en/**\n",
    ),
    "of folders": DataSet(
        {"main/train.jsonl": range(5), "main/test.jsonl": range(5, 7), "socratic/train.jsonl": range(10, 15)},
        "configs:\n- config_name: main\n  data_dir: main\n- config_name: socratic\n  data_dir: socratic\n",
    ),
    "of patterns below a folder": DataSet(
        {"v2/a-1.jsonl": range(5), "v2/b-1.jsonl": range(5, 7), "a-1.jsonl": range(10, 15)},
        "configs:\n- config_name: v2\n  data_dir: v2\n  data_files: ['a-*', 'b-*']\n",
    ),
    "with a file that is missing": DataSet(
        {"a.jsonl": range(5)}, "configs:\n- config_name: default\n  data_files: b.jsonl\n"
    ),
    "whose card is another's": DataSet({"train.jsonl": range(5), "test.jsonl": range(5, 7)}, "tags:\n- chat\n"),
}  # fmt: skip

SELECTIONS = [
    Selection("of one subset", None, "train", [*range(10)]),
    Selection("of one subset", "default", "train[-30%:]", [7, 8, 9]),
    Selection("of one subset", None, "held_out", [20, 21]),
    Selection("of one subset", None, "train[8:]+held_out[:1]", [8, 9, 20]),
    Selection("of one subset", None, "test", None),
    Selection("of one subset", "en", "train", None),
    Selection("of subsets in files", "fr", "train", [*range(5, 10)]),
    Selection("of subsets in files", None, "train", None),
    Selection("with a default", None, "train", [*range(7)]),
    Selection("with a default", "fr", "train[1:3]", [11, 12]),
    Selection("of folders", "main", "test", [5, 6]),
    Selection("of folders", "socratic", "train", [*range(10, 15)]),
    Selection("of folders", "main", "validation", None),
    Selection("of folders", None, "train", None),
    Selection("of patterns below a folder", None, "train", [*range(7)]),
    Selection("with a file that is missing", None, "train", None),
    Selection("whose card is another's", None, "test", [5, 6]),
]
