"""`flightdeck data`: how data was read, and rows as the model sees them. The engine is real, the node this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.api import DataInspection
from engine.cluster.probe_results import JsonlSummary, ShownRow
from tests.tui.commands import flightdeck
from tests.unit.node.data_set_cases import DataSet
from tui.commands.data import show
from tui.commands.terminal import Lines


def test_it_shows_how_a_file_was_read_and_writes_the_standard_files(home: Path, tmp_path: Path) -> None:
    rows = [f"{number},{number},level {number}?,three {number}" for number in range(60)]
    (tmp_path / "qa.csv").write_text("\n".join([",id,question,answer", *rows, "60,60,wind?,\n"]))
    done = flightdeck(home, "data", "qa.csv", "--rows", "2", "--write", "out", cwd=tmp_path)
    assert done.code == 0, done.err
    written = {path.stem: len(path.read_text().splitlines()) for path in (tmp_path / "out").iterdir()}
    for text in (
        f"{tmp_path}/qa.csv on here",
        "read as   1 file of completions; 5.0% split off as valid; not read: a column without a name, id",
        f"train     {written['train']} rows, chat",
        "row 1, line 1 of train.jsonl\nuser: level ",
        "warn 1 row left out, without an answer",
        "written: out/train.jsonl, out/valid.jsonl",
    ):
        assert text in done.out, text
    assert sum(written.values()) == 60


def test_data_that_cannot_be_read_is_told_with_the_row_and_exits_1(home: Path, tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\nwind?\n")
    done = flightdeck(home, "data", "qa.csv", "--json", cwd=tmp_path)
    document = json.loads(done.out)
    assert (done.code, document["files"], document["rows"]) == (1, {}, [])
    assert document["faults"] == [f"{tmp_path}/qa.csv: line 2 has 1 fields, and the header has 2"]


def test_a_data_set_in_the_cache_is_named_with_its_subset(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hf" / "hub" / "datasets--org--set"
    card = "configs:\n- config_name: en\n  data_files: en.jsonl\n- config_name: fr\n  data_files: fr.jsonl\n"
    files = {"en.jsonl": range(30), "fr.jsonl": range(30, 90)}
    snapshot = DataSet(files, card).write(repository / "snapshots" / ("a" * 40))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "model.safetensors").touch()
    done = flightdeck(home, "data", "hf:org/set fr", "--rows", "1", "--model", "model.safetensors", cwd=tmp_path)
    assert done.code == 0 and f"{snapshot} on here" in done.out, done.err
    assert "user: 30\nassistant: a" in done.out and "not tried: a file, no directory" in " ".join(done.out.split())
    for name, code, why in (
        ("hf:org/set", 1, "several subsets, one of which [data] subset names: its README.md has en, fr"),
        ("hf:org/set ../fr", 2, "give the name of a subset"),
        ("hf:", 2, "'hf:' is not a data set (give hf:org/set"),
        ("hf:org/other", 2, "`hf download --repo-type dataset org/other` brings it there"),
    ):
        done = flightdeck(home, "data", name, cwd=tmp_path)
        assert (done.code, why in " ".join((done.out + done.err).split())) == (code, True), done.out + done.err


def test_a_folder_below_a_folder_is_no_name_on_the_hub(home: Path, tmp_path: Path) -> None:
    (tmp_path / "org" / "set").mkdir(parents=True)
    rows = [json.dumps({"prompt": f"level {number}?", "completion": "three"}) for number in range(30)]
    (tmp_path / "org" / "set" / "train.jsonl").write_text("\n".join(rows))
    done = flightdeck(home, "data", "org/set", cwd=tmp_path)
    assert done.code == 0 and f"{tmp_path}/org/set on here" in done.out, done.out + done.err


def test_lengths_are_summed_up_and_what_is_masked_is_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    file = JsonlSummary(lines=100, examples=100, sha256="a", form="chat", faults=[], fault_count=0, foreign=None)
    row = ShownRow(line=7, masked="user: wind?", trained="assistant: calm", tokens=12, targets=5, cut=2)
    inspection = DataInspection(
        node="ana",
        source="/data",
        conversion=None,
        files={"train": file},
        lengths={"train": {10: 90, 100: 8, 3000: 2}},
        rows=(row,),
        warnings=(),
        faults=(),
    )
    show(Lines(), inspection)
    output = capsys.readouterr().out
    for text in (
        "read as   mlx-lm's own files",
        "100 rows, chat; tokens: mean 77, median 10, 95 % 100, longest 3,000",
        "masked    44% of the tokens of these rows:",
        "row 1, line 7 of train.jsonl: 12 tokens, 2 of them cut off, 5 trained on\n[user: wind?]assistant: calm",
    ):
        assert text in output, output
