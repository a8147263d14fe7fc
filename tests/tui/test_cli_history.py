"""runs --filter and --sort, tag, note, delete: exit codes, JSON, and one clear line for what is wrong."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

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
    assert names(home, "--sort=-loss", "-n", "1") == ["first"]
    assert names(home, "--filter", "name:none") == []
    assert flightdeck(home, "runs", "--filter", "name:none").out == "no run is like that\n"


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


def test_delete_asks_and_says_what_it_freed(home: Path, runs: list[MadeRun]) -> None:
    asked = flightdeck(home, "delete", "first")
    assert (asked.code, asked.err) == (2, "flightdeck: nobody can be asked: nothing was deleted (add --yes)\n")
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
