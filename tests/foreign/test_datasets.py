"""Hugging Face's datasets, on the data sets that the tests of engine.node.data_splits read: it takes the same rows."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.needs import FOREIGN
from tests.unit.node.data_set_cases import DATA_SETS, SELECTIONS

pytestmark = [pytest.mark.busy, pytest.mark.slow, pytest.mark.needs("foreign")]

LOAD = """
import datasets, json, sys
for path, subset, split in json.load(sys.stdin):
    try:
        rows = [int(row["question"]) for row in datasets.load_dataset(path, subset, split=split)]
    except (ValueError, datasets.exceptions.DatasetsError, FileNotFoundError) as error:
        rows = None
    print(json.dumps(rows))
"""


def test_it_takes_the_same_rows(tmp_path: Path) -> None:
    folders = {
        name: str(data_set.write(tmp_path / f"set{at}")) for at, (name, data_set) in enumerate(DATA_SETS.items())
    }
    asked = [[folders[selection.data_set], selection.subset, selection.rows] for selection in SELECTIONS]
    done = subprocess.run(
        [FOREIGN, "-c", LOAD],
        input=json.dumps(asked),
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    taken = [json.loads(line) for line in done.stdout.splitlines()]
    assert taken == [selection.numbers for selection in SELECTIONS]
