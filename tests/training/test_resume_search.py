"""The state that a training resumes from, with ranks as threads of this process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.job import JobError, config_hash
from engine.protocol.safetensors import CheckpointError
from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.resume import Resume, StateCopy, complete_states
from engine.trainer.checkpoint.saving import EmergencyCheckpoint
from engine.trainer.collective import Collective
from engine.trainer.replica_check import Corrupted
from engine.trainer.strategies.base import Strategy
from engine.training.checkpoint_files import MANIFEST_NAME, ORDER, FileEntry, Manifest, ResumePoint, check_inputs
from tests.training.states import (
    INPUTS,
    WINDOW,
    FakeStrategy,
    corrupt,
    events,
    locations,
    origin,
    reporter,
    snapshot,
    spec,
    tamper,
)
from tests.training.together import together


def resume(
    home: Path,
    folders: list[list[Path]],
    unfit: set[float] | None = None,
    others: set[float] | None = None,
    **fields: Any,
) -> tuple[list[ResumePoint], list[FakeStrategy], str]:
    """Resume on a rank for each of `folders`: the points, the restored strategies, and the warnings. `fields`: of
    AttemptSpec."""
    strategies = [FakeStrategy() for _ in folders]
    for one in strategies:
        one.unfit, one.others = unfit or set(), others or set()

    def run(collective: Collective) -> ResumePoint:
        rank = collective.rank
        reports, strategy = reporter(home / f"e{rank}", rank), cast("Strategy", strategies[rank])
        return Resume(collective, strategy, origin(), reports, spec(**fields)).run(dict.fromkeys(folders[rank]))

    starts = together(len(folders), run)
    messages = "\n".join(
        event["message"]
        for rank in range(len(folders))
        for event in events(home / f"e{rank}")
        if event["event"] == "warning"
    )
    return starts, strategies, messages


def test_the_config_hash_does_not_depend_on_the_layer_split() -> None:
    raw = {"iters": 3, "layer_split": "0-1,1-4"}
    assert config_hash(raw) == config_hash({**raw, "layer_split": "0-4"}) == config_hash({"iters": 3})
    assert config_hash(raw) != config_hash({**raw, "iters": 4})


def test_a_state_is_complete_when_every_part_is_on_some_rank() -> None:
    # Of each rank: update, part, parts.
    rows = [[(7, 0, 2), (5, 0, 2), (3, 0, 1)], [(5, 1, 2), (3, 0, 1)], [(6, 1, 3)]]
    found = complete_states(
        StateCopy(rank, index, Manifest("job", 2, part, parts, {}, 2 * update, update, versions={}, files=()), None)
        for rank, copies in enumerate(rows)
        for index, (update, part, parts) in enumerate(copies)
    )
    assert [{copy.manifest.update for copies in whole for copy in copies} for whole in found] == [{5}, {3}]
    holders = [[[(copy.rank, copy.number) for copy in copies] for copies in whole] for whole in found]
    assert holders == [[[(0, 1)], [(1, 0)]], [[(0, 2), (1, 1)]]]


def test_the_newest_state_of_any_rank_is_restored_on_all(tmp_path: Path) -> None:
    store.write(tmp_path / "a", snapshot(4), origin())
    store.write(tmp_path / "b", snapshot(9), origin())
    starts, strategies, messages = resume(tmp_path, [[tmp_path / "a"], [tmp_path / "b"], []])
    assert starts == [ResumePoint(18, 9, WINDOW, "checkpoint", 1)] * 3
    assert [one.restored for one in strategies] == [{0: 9.0}] * 3
    assert messages == ""


def test_of_equal_states_the_lowest_ranks_is_used_and_the_next_ones_if_that_is_corrupt(tmp_path: Path) -> None:
    copies = [store.write(tmp_path / name, snapshot(4), origin()) for name in ("a", "b")]
    folders = [[tmp_path / "a"], [tmp_path / "b"]]
    assert resume(tmp_path / "one", folders)[0][0].rank == 0
    corrupt(copies[0])
    starts, strategies, messages = resume(tmp_path / "two", folders)
    assert [start.rank for start in starts] == [1, 1] and [one.restored for one in strategies] == [{0: 4.0}] * 2
    assert "its hash is not the manifest's" in messages


def test_a_state_that_does_not_fit_the_job_is_reported_and_the_one_before_is_used(tmp_path: Path) -> None:
    for update in (1, 2):
        store.write(tmp_path / "a", snapshot(update), origin())
    store.write(tmp_path / "a", snapshot(3), origin(job="another"))
    starts, strategies, messages = resume(tmp_path, [[tmp_path / "a"], []], unfit={2.0})
    assert [start.update for start in starts] == [1, 1] and strategies[1].restored == {0: 1.0}
    assert "w is of another shape" in messages and "it is of another job" in messages


def test_a_state_that_was_changed_together_with_its_manifest_is_refused_by_what_the_journal_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [store.write(tmp_path / "a", snapshot(update), origin()) for update in (1, 2)]
    entries = [each.manifest.journal_entry() for each in written]
    assert [entry["state"] for entry in entries] == ["1.0", "2.0"]
    raw = (written[1].path / MANIFEST_NAME).read_bytes()
    assert entries[1]["manifest"] == hashlib.sha256(raw).hexdigest()
    recorded = [tuple(entry.values()) for entry in entries]
    starts, _, messages = resume(tmp_path / "one", [[tmp_path / "a"], []], manifests=recorded)
    assert starts == [ResumePoint(4, 2, WINDOW, "checkpoint", 0, recorded=True)] * 2 and messages == ""
    assert "not recorded" not in capsys.readouterr().out
    tamper(written[1].path)
    changed = hashlib.sha256((written[1].path / MANIFEST_NAME).read_bytes()).hexdigest()
    starts, strategies, messages = resume(tmp_path / "two", [[tmp_path / "a"], []], manifests=recorded)
    assert [start.update for start in starts] == [1, 1] and strategies[1].restored == {0: 1.0}
    assert f"the state in {written[1].path} is not used: its manifest is not the one that it was saved with" in messages
    assert changed[:12] in messages and entries[1]["manifest"][:12] in messages


def test_a_state_that_the_journal_does_not_know_is_used_and_said_to_be_unrecorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank died between the commit and its event, or the run is an older release's."""
    known = store.write(tmp_path / "a", snapshot(1), origin())
    store.write(tmp_path / "a", snapshot(2), origin())
    for number, recorded in enumerate([[tuple(known.manifest.journal_entry().values())], []]):
        starts, _, messages = resume(tmp_path / str(number), [[tmp_path / "a"]], manifests=recorded)
        assert starts == [ResumePoint(4, 2, WINDOW, "checkpoint", 0)] and messages == ""
        assert "its manifest is not recorded in the run's journal" in capsys.readouterr().out


def test_a_run_whose_state_is_lost_does_not_silently_start_again(tmp_path: Path) -> None:
    raised: list[str] = []

    def run(collective: Collective) -> None:
        rank = collective.rank
        reports, needed = reporter(tmp_path / f"e{rank}", rank), spec(needs_state="that of update 40 was saved")
        search = Resume(collective, cast("Strategy", FakeStrategy()), origin(), reports, needed)
        with pytest.raises(JobError) as error:
            search.run({tmp_path / "none": None}, adapter=rank == 0)
        raised.append(str(error.value))

    together(2, run)
    assert len(raised) == 2 and raised[0] == raised[1]
    assert raised[0] == (
        "no state to resume from (no rank has any), and that of update 40 was saved: bring the state back and "
        "`flightdeck resume last`, or begin at iteration 1 with `flightdeck resume last --without-state`"
    )
    # Not with a state, nor when none is needed.
    assert resume(tmp_path / "one", [[], []])[0] == [ResumePoint()] * 2
    store.write(tmp_path / "a", snapshot(4), origin())
    assert [start.update for start in resume(tmp_path / "two", [[tmp_path / "a"], []], needs_state="x")[0]] == [4, 4]


def test_a_state_of_other_data_or_another_base_model_is_used_only_when_told(tmp_path: Path) -> None:
    store.write(tmp_path / "a", snapshot(3), origin())
    store.write(tmp_path / "a", snapshot(4), origin(inputs={**INPUTS, "train.jsonl": "crc32 00000002"}))

    def run(collective: Collective, *, accept: bool) -> ResumePoint | str:
        rank = collective.rank
        reports, accepting = reporter(tmp_path / f"e{rank}", rank), spec(accept_changed_data=accept)
        search = Resume(collective, cast("Strategy", FakeStrategy()), origin(), reports, accepting)
        try:
            return search.run({tmp_path / "a": None} if rank == 0 else {})
        except JobError as error:
            return str(error)

    refused = together(2, partial(run, accept=False))
    assert len(set(refused)) == 1 and isinstance(refused[0], str) and "\n" not in refused[0]
    assert refused[0].startswith("train.jsonl changed since the state of iteration 8 was saved: ")
    assert "`flightdeck resume last --accept-changed-data`" in refused[0]
    accepted = together(2, partial(run, accept=True))
    assert accepted == [ResumePoint(8, 4, WINDOW, "checkpoint", 0)] * 2
    messages = [event["message"] for event in events(tmp_path / "e0") if event["event"] == "warning"]
    assert messages == [
        "train.jsonl changed since the state of iteration 8 was saved, and --accept-changed-data goes on all the same"
    ]


@pytest.mark.parametrize("name", ["train.jsonl", "valid.jsonl", "the base model"])
def test_the_best_validation_is_not_one_of_other_data_or_of_another_base_model(tmp_path: Path, name: str) -> None:
    present = {**INPUTS, "valid.jsonl": "crc32 00000003"}
    best = {"loss": 1.5, "iteration": 6, "since": 1}
    for update, inputs in ((3, present), (4, {**present, name: "crc32 00000004"})):
        store.write(tmp_path / "a", replace(snapshot(update), best=best), origin(inputs=inputs))

    def run(collective: Collective) -> ResumePoint:
        reports = reporter(tmp_path / f"e{collective.rank}", collective.rank)
        accepting = spec(accept_changed_data=True)
        search = Resume(collective, cast("Strategy", FakeStrategy()), origin(inputs=present), reports, accepting)
        return search.run({tmp_path / "a": None})

    (start,) = together(1, run)
    assert (start.update, start.best) == (4, best if name == "train.jsonl" else {})


def test_a_state_of_another_order_of_the_examples_is_used_only_when_told(tmp_path: Path) -> None:
    """As of a release that sorted them by characters, or of another version of the tokenizer."""
    orders: tuple[dict[str, str], ...] = ({}, {ORDER: "crc32 00000001"}, {ORDER: "crc32 00000002"})
    kept = [
        store.write(tmp_path / str(number), snapshot(4), origin(inputs={**INPUTS, **order})).manifest
        for number, order in enumerate(orders)
    ]
    present = [{**INPUTS, ORDER: "crc32 00000001"}]
    check_inputs(kept[1], present, reporter(tmp_path / "same", 0), accept=False)
    for manifest in (kept[0], kept[2]):
        with pytest.raises(JobError, match=r"^the order of train\.jsonl changed since the state of iteration 8"):
            check_inputs(manifest, present, reporter(tmp_path / "other", 0), accept=False)
    check_inputs(kept[0], present, reporter(tmp_path / "told", 0), accept=True)
    other = {**present[0], "train.jsonl": "crc32 00000002"}
    with pytest.raises(JobError, match=r"^train\.jsonl changed"):
        check_inputs(kept[2], [other], reporter(tmp_path / "both", 0), accept=False)


def resume_runs(
    home: Path, runs: list[Path], on_corruption: str = "stop"
) -> tuple[list[ResumePoint | Corrupted], list[FakeStrategy], str]:
    """Resume on a rank for each folder of a run: the points or errors, the restored strategies, and the warnings."""
    strategies = [FakeStrategy() for _ in runs]

    def run(collective: Collective) -> ResumePoint | Corrupted:
        rank = collective.rank
        reported = reporter(home / f"e{rank}", rank)
        acting = spec(on_corruption=on_corruption)
        search = Resume(collective, cast("Strategy", strategies[rank]), origin(), reported, acting)
        try:
            return search.run(locations(runs[rank]).states())
        except Corrupted as error:
            return error

    found = together(len(runs), run)
    messages = [
        event["message"] for rank in range(len(runs)) for event in events(home / f"e{rank}") if "message" in event
    ]
    return found, strategies, "\n".join(messages)


def save_on_ranks(home: Path, attempt: int, values: list[float]) -> list[Path]:
    """A node for each rank of an attempt, which has saved its state of update 4."""
    for rank, value in enumerate(values):
        store.write(home / f"n{rank}" / "emergency" / str(attempt) / f"rank{rank}", snapshot(4, value), origin())
    return [home / f"n{rank}" for rank in range(len(values))]


def test_an_outvoted_emergency_checkpoint_is_not_used(tmp_path: Path) -> None:
    found, strategies, messages = resume_runs(tmp_path / "one", save_on_ranks(tmp_path, 1, [9.0, 4.0, 4.0]))
    assert (
        found == [ResumePoint(8, 4, WINDOW, "emergency", 1)] * 3
        and [one.restored for one in strategies] == [{0: 4.0}] * 3
    )
    assert "update 4" in messages and "attempt 1" in messages and "rank 0 is outvoted by the others" in messages
    # Two ranks of one node see the same folders: these count once.
    (tmp_path / "n1").rename(tmp_path / "gone")
    (tmp_path / "n1").mkdir()
    nodes = [tmp_path / "n0", tmp_path / "n0", tmp_path / "n2"]
    assert all(isinstance(one, Corrupted) for one in resume_runs(tmp_path / "two", nodes)[0])


def test_emergency_checkpoints_that_differ_without_a_majority_are_not_used(tmp_path: Path) -> None:
    runs = save_on_ranks(tmp_path, 1, [9.0, 4.0])
    found, strategies, _ = resume_runs(tmp_path / "stop", runs)
    for error in found:
        assert isinstance(error, Corrupted) and error.facts == {"ranks": [0, 1], "certain": False}
        assert "ranks 0, 1 disagree" in str(error) and "\n" not in str(error)
    assert [one.restored for one in strategies] == [{}, {}]
    found, strategies, messages = resume_runs(tmp_path / "warn", runs, "warn")
    assert [one.restored for one in strategies] == [
        {0: 9.0}
    ] * 2 and "no majority that tells which is right" in messages


def test_emergency_checkpoints_of_different_attempts_may_differ(tmp_path: Path) -> None:
    """Another number of ranks sums in another order."""
    store.write(tmp_path / "n0" / "emergency" / "1" / "rank0", snapshot(4, 9.0), origin())
    store.write(tmp_path / "n1" / "emergency" / "2" / "rank1", snapshot(4, 4.0), origin())
    found, _, messages = resume_runs(tmp_path, [tmp_path / "n0", tmp_path / "n1"])
    assert found == [ResumePoint(8, 4, WINDOW, "emergency", 0)] * 2 and messages == ""


@pytest.mark.parametrize(
    "facts",
    [
        {"iteration": None},
        {"iteration": "4"},
        {"iteration": -4},
        {"part": 1},
        {"parts": 10**9},
        {"part": True, "parts": 2},
        {"window": {"losses": "many"}},
        {"window": []},
        {"window": {"losses": 1, "gradient_sum": 2.0}},
        {"best": {"loss": None}},
        {"best": {"loss": 1.5, "rank": 1}},
    ],
)
def test_a_manifest_with_impossible_facts_is_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    written = store.write(tmp_path / "a", snapshot(2), origin())
    manifest = json.loads((written.path / MANIFEST_NAME).read_bytes())
    (written.path / MANIFEST_NAME).write_text(json.dumps({**manifest, **facts}))
    starts, strategies, messages = resume(tmp_path, [[tmp_path / "a"]])
    assert starts[0].source == "none" and strategies[0].restored == {}
    assert "its manifest" in messages and "1 were refused" in messages


def test_each_rank_restores_its_own_part_and_another_number_of_ranks_all_parts(tmp_path: Path) -> None:
    for part in (0, 1):
        store.write(tmp_path / f"p{part}", snapshot(5, value=10.0 + part), origin(part, 2))
        store.write(tmp_path / f"p{part}", snapshot(6, value=20.0 + part), origin(part, 2))
    folders = [[tmp_path / "p0"], [tmp_path / "p1"]]
    starts, strategies, _ = resume(tmp_path / "same", folders)
    assert starts == [ResumePoint(12, 6, WINDOW, "checkpoint", None)] * 2
    assert [one.restored for one in strategies] == [{0: 20.0}, {0: 21.0}]
    # One rank's layers have changed: all ranks get all parts.
    starts, strategies, messages = resume(tmp_path / "divided", folders, others={21.0})
    assert starts == [ResumePoint(12, 6, WINDOW, "checkpoint", 0)] * 2 and messages == ""
    assert [one.restored for one in strategies] == [{0: 20.0, 1: 21.0}] * 2
    _, strategies, _ = resume(tmp_path / "three", [*folders, []])
    assert [one.restored for one in strategies] == [{0: 20.0, 1: 21.0}] * 3
    _, strategies, _ = resume(tmp_path / "one", [folders[0] + folders[1]])
    assert strategies[0].restored == {0: 20.0, 1: 21.0}


def test_a_corrupt_part_makes_the_whole_state_unusable(tmp_path: Path) -> None:
    for part in (0, 1):
        store.write(tmp_path / f"p{part}", snapshot(5, value=10.0 + part), origin(part, 2))
    newer = [store.write(tmp_path / f"p{part}", snapshot(6), origin(part, 2)) for part in (0, 1)]
    corrupt(newer[1])
    starts, strategies, messages = resume(tmp_path, [[tmp_path / "p0"], [tmp_path / "p1"]])
    assert [start.update for start in starts] == [5, 5]
    assert [one.restored for one in strategies] == [{0: 10.0}, {0: 11.0}] and "step-000000006" in messages


def test_an_emergency_checkpoint_is_recorded_by_its_author_beside_the_periodic_one_of_its_update(
    tmp_path: Path,
) -> None:
    periodic = store.write(tmp_path / "checkpoints", snapshot(4), origin())
    recorded = [tuple(periodic.manifest.journal_entry().values())]
    home, folder = tmp_path / "home", tmp_path / "home" / "emergency" / "2" / "rank1"
    checkpoint = EmergencyCheckpoint(home, 2, 1, origin(), reporter(tmp_path / "e", 1))
    checkpoint.hold(snapshot(4, value=7.0))
    checkpoint.save_on_peer_loss()
    event = events(tmp_path / "e")[-1]
    manifest = store.verify(folder / "step-000000004").manifest
    assert (event["state"], event["manifest"]) == ("4.0@2.1", manifest.journal_entry()["manifest"])
    assert not manifest.check_recorded(recorded, (2, 1)), "its event was not received: it is not known"
    assert manifest.check_recorded([*recorded, (event["state"], event["manifest"])], (2, 1))
    with pytest.raises(CheckpointError, match="not the one that it was saved with"):
        manifest.check_recorded(recorded)


@given(
    st.builds(
        Manifest,
        config_hash=st.text("0123456789abcdef", max_size=64),
        world_size=st.integers(1, 999),
        part=st.just(0),
        parts=st.integers(1, 999),
        inputs=st.dictionaries(st.text(), st.text()),
        update=st.integers(0, 2**40),
        iteration=st.integers(0, 2**40),
        window=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 2**60)),
        best=st.just({}),
        versions=st.just({"python": "3.12.1"}),
        files=st.just((FileEntry("weights.safetensors", 64 * "a", 10, 10, "none"),)),
    )
)
def test_a_manifest_that_is_read_and_written_again_has_the_same_bytes(manifest: Manifest) -> None:
    """So a node that is sent a state has what the journal recorded."""
    assert Manifest.from_json(manifest.to_json()).to_json() == manifest.to_json()
