"""runs --filter and --sort, tag, note, delete: exit codes, JSON, and one clear line for what is wrong."""

from __future__ import annotations

import csv
import io
import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from engine.api import comparisons
from tests.tui.commands import flightdeck
from tests.unit.run.run_maker import START, MadeRun, make_run_config, report


@pytest.fixture
def runs(home: Path) -> list[MadeRun]:
    """Two failed runs and one that has succeeded, each an hour later, the latter with a lower loss and rate."""
    made = []
    for number, (name, state, loss, rate) in enumerate(
        [("first", "failed", 3.0, 1e-3), ("second", "failed", 2.0, 1e-4), ("third", "succeeded", 1.0, 1e-5)]
    ):
        config = make_run_config(name=name)
        job = config.job.model_copy(update={"mlx_lm": {**config.job.mlx_lm, "learning_rate": rate}})
        config = config.model_copy(update={"job": job})
        run = MadeRun(home, created=START + timedelta(hours=number), name=name, config=config)
        run.state("preflight", "launching").attempt().state("running", "finishing").metrics([report(10, loss)])
        reason = "completed" if state == "succeeded" else "rank_failed"
        made.append(run.state(state, reason=reason, iteration=10, train_loss=loss).close())
    return made


def names(home: Path, *options: str) -> list[str]:
    done = flightdeck(home, "runs", "--json", *options)
    assert (done.code, done.err) == (0, "")
    return [run["name"] for run in json.loads(done.out)]


def test_runs_are_filtered_sorted_and_limited(home: Path, runs: list[MadeRun]) -> None:
    assert names(home) == ["third", "second", "first"]
    assert names(home, "--filter", "state:failed lr<1e-3") == ["second"]
    assert names(home, "--sort", "loss") == ["third", "second", "first"]
    assert names(home, "--sort=-loss", "-n", "1") == names(home, "--sort", "-loss", "-n", "1") == ["first"]
    assert names(home, "--filter", "-name:first", "--sort", "loss") == ["third", "second"]
    assert names(home, "--filter", "name:none") == []
    assert flightdeck(home, "runs", "--filter", "name:none").out == "no run is like that\n"
    for option in ("--filter", "--sort"):
        forgotten = flightdeck(home, "runs", option, "-n", "3")
        assert (forgotten.code, "expected one argument" in forgotten.err) == (2, True), "-n is an option of its own"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--filter", "lossy<3"], "flightdeck: runs have no 'lossy' (did you mean loss?)\n"),
        (["--sort", "lossy"], "flightdeck: runs have no 'lossy' (did you mean loss?)\n"),
        (["--filter", "(a"], "flightdeck: the filter cannot be read: a ( is not closed\n"),
    ],
)
def test_a_fault_of_a_filter_is_one_line(home: Path, options: list[str], line: str) -> None:
    done = flightdeck(home, "runs", *options)
    assert (done.code, done.err) == (2, line)


def test_tags_and_a_note_are_written_shown_and_removed(home: Path, runs: list[MadeRun]) -> None:
    first = runs[0].id
    assert flightdeck(home, "tag", "first", "night", "base").out == f"{first}: base, night\n"
    assert flightdeck(home, "note", "first", "too fast").out == f"{first}: too fast\n"
    assert names(home, "--filter", "tag:night note:fast") == ["first"]
    assert "base, night" in flightdeck(home, "runs").out
    shown = flightdeck(home, "show", "first").out
    assert "  tags       base, night\n  your note  too fast\n" in shown
    document = json.loads(flightdeck(home, "show", "first", "--json").out)
    assert (document["tags"], document["note"]) == (["base", "night"], "too fast")
    removed = json.loads(flightdeck(home, "tag", "first", "--remove", "night", "--json").out)
    assert removed == {"id": first, "tags": ["base"]}
    assert json.loads(flightdeck(home, "note", "first", "", "--json").out) == {"id": first, "note": None}
    assert flightdeck(home, "note", "first").out == f"{first}: no note\n"
    refused = flightdeck(home, "tag", "first", "a b")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


@pytest.mark.parametrize("arguments", [("delete", "first"), ("queue", "install")])
def test_a_person_is_asked_on_stderr_so_that_stdout_may_go_to_a_file(
    home: Path, runs: list[MadeRun], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("tui.commands.terminal.is_person", lambda stream: stream is not sys.stdout)
    monkeypatch.setattr("engine.queue.autostart._succeeds", lambda *_: True)
    monkeypatch.setattr("builtins.input", lambda: "n")
    done = flightdeck(home, *arguments)
    assert done.err.endswith(" [y/N] ")
    assert done.out and "[y/N]" not in done.out


def test_delete_asks_and_says_what_it_freed(home: Path, runs: list[MadeRun]) -> None:
    asked = flightdeck(home, "delete", "first")
    assert (asked.code, asked.err) == (
        2,
        "flightdeck: nobody can be asked: nothing was changed (add --yes, or run it in a terminal)\n",
    )
    folder = home / "node" / "runs" / runs[0].id / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 200_000)
    done = flightdeck(home, "delete", "first", runs[1].id, "--yes")
    assert done.code == 0
    assert f"{runs[0].id}: freed 2" in done.out
    assert "  node0, node1: 2" in done.out and f" kB in {folder.parent}\n" in done.out
    assert names(home) == ["third"]
    (document,) = json.loads(flightdeck(home, "delete", "third", "--yes", "--json").out)
    assert (document["run"], document["deleted"]) == (runs[2].id, True)
    assert flightdeck(home, "delete", "third", "--yes").code == 2


def test_delete_ends_with_1_where_a_node_keeps_its_folder(home: Path) -> None:
    config = make_run_config(name="away")
    nodes = tuple(node.model_copy(update={"python": "/no/python"}) for node in config.nodes)
    run = MadeRun(home, name="away", config=config.model_copy(update={"nodes": nodes}))
    run.state("preflight", "launching").attempt().state("running", "finishing").state("failed", reason="rank_failed")
    run.close()
    done = flightdeck(home, "delete", "away", "--yes")
    assert done.code == 1
    assert f"  node0, node1: stays in {home / 'node' / 'runs' / run.id}: " in done.out
    assert "the run stays listed while node0, node1 cannot be cleaned up; --anyway deletes the rest" in done.out
    assert flightdeck(home, "delete", "away", "--yes", "--anyway").code == 1
    assert names(home) == []


def test_compare_says_what_differs_and_which_is_best(home: Path, runs: list[MadeRun]) -> None:
    done = flightdeck(home, "compare", "first", "third")
    assert (done.code, done.err) == (0, "")
    rows = {line.split()[-3]: line.split()[-2:] for line in done.out.splitlines() if "learning_rate" in line}
    assert rows == {"learning_rate": ["0.001", "1e-05"]}
    assert any(line.split() == ["train", "loss", "3.000", "1.000", "third-0000"] for line in done.out.splitlines())
    document = json.loads(flightdeck(home, "compare", "first", "third", "--json").out)
    assert document["names"] == ["first-0000", "third-0000"]
    assert {"section": "configuration", "key": "learning_rate", "values": [1e-3, 1e-5], "best": None} in document[
        "differences"
    ]
    assert document["speeds"][0]["summary"] == "third-0000 is as fast as first-0000: 800 and 800 tokens/s"


@pytest.mark.parametrize("names", [["first"], ["first", "first"]])
def test_compare_takes_two_runs(home: Path, runs: list[MadeRun], names: list[str]) -> None:
    done = flightdeck(home, "compare", *names)
    assert (done.code, done.err) == (2, "flightdeck: there is nothing to compare: it takes 2 to 50 runs\n")


def test_runs_are_exported_as_rows_with_their_run(home: Path, runs: list[MadeRun], tmp_path: Path) -> None:
    done = flightdeck(home, "export", "first", "second")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [(row["run"], row["iteration"], row["train_loss"]) for row in rows] == [
        (runs[0].id, "10", "3.0"),
        (runs[1].id, "10", "2.0"),
    ]
    lines = flightdeck(home, "export", "first", "--format", "jsonl").out.splitlines()
    assert [json.loads(line)["train_loss"] for line in lines] == [3.0]
    file = tmp_path / "rows.csv"
    assert flightdeck(home, "export", "first", "-o", str(file)).out == f"{file}: 1 run\n"
    assert file.read_text() == done.out.replace(f"{done.out.splitlines()[2]}\n", "")
    assert flightdeck(home, "export", "nothing", "-o", str(file)).code == 2
    runs[0].directory.metrics.unlink()
    runs[0].directory.metrics.mkdir()
    assert flightdeck(home, "export", "second", "first", "-o", str(file)).code == 1
    assert file.read_text().startswith("run,") and [path.name for path in tmp_path.iterdir()].count("rows.csv") == 1
    assert not list(tmp_path.glob(".rows.csv*"))


def test_a_figure_that_is_new_at_the_second_reading_stops_no_export(
    runs: list[MadeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(([{"run": "r", "loss": 1}], [{"run": "r", "loss": 1}, {"run": "r", "loss": 2, "speed": 3}]))
    monkeypatch.setattr(comparisons, "_rows", lambda directories: next(readings))
    output = io.StringIO()
    comparisons._write_rows([], "csv", output)
    assert output.getvalue() == "run,loss\nr,1\nr,2\n"


def test_runs_are_exported_for_tensorboard_a_folder_each(home: Path, runs: list[MadeRun], tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    assert flightdeck(home, "export", "first", "--format", "tensorboard").code == 2
    done = flightdeck(home, "export", "first", "second", "--format", "tensorboard", "-o", str(folder), "--json")
    assert json.loads(done.out) == {"output": str(folder), "runs": [runs[0].id, runs[1].id]}
    (file,) = (folder / runs[0].id).glob("events.out.tfevents.*")
    assert b"train_loss" in file.read_bytes()
