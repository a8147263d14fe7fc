"""The result of a run by its journal and its metrics; that of an older release's run has no files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.models import RunRecord, RunState
from engine.run.events import (
    Attempt,
    AttemptPlanned,
    EnergyMeasured,
    Event,
    NodeConditionChanged,
    RunPlanned,
    SavedFiles,
    StateChanged,
    StateSaved,
    TrainingStarted,
    WeightsSaved,
)
from engine.run.history import fold
from engine.run.metrics import MetricsSeries
from engine.run.result import run_result
from engine.snapshots import Energy, ResultFile, RunResult, ValidationLoss

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUN = RunRecord(id="r", name="demo", state=RunState.PLANNED, created_at=START, world_size=2, backend="ring")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def attempt(number: int = 1, seconds: float = 0.0, nodes: tuple[str, ...] = ("ana", "bea")) -> AttemptPlanned:
    named: dict[str, object] = {"nodes": nodes, "layouts": (), "log_bases": {}, "event_bases": {}}
    plan = Attempt.model_validate({"number": number, "nonce": f"n.{number}", "starting_port": 20_000, **named})
    return AttemptPlanned(at=at(seconds), attempt=plan)


def weights(iteration: int, *names: str, val_loss: float | None = None, holds: str = "adapter") -> WeightsSaved:
    files = tuple((name, 7, f"{iteration:064x}") for name in names)
    saved = SavedFiles(folder="/home/ana/adapters", iteration=iteration, files=files)
    return WeightsSaved.model_validate(
        {"rank": 0, "node": "ana", "attempt": 1, "holds": holds, "val_loss": val_loss, "saved": saved}
    )


def state(update: int, part: int, parts: int, *, author: str = "", digest: str = "0") -> StateSaved:
    folder = f"/home/n{part}/checkpoints/{f'part{part}/' if parts > 1 else ''}step-{update:09d}"
    saved = SavedFiles(folder=folder, iteration=update, files=(("weights", 5, digest * 64),), parts=parts)
    name = f"{update}.{part}{author}"
    return StateSaved(rank=part, node=f"n{part}", state=name, manifest=digest * 64, saved=saved)


def result(
    tmp_path: Path | None, *recorded: Event, rows: Iterable[dict[str, object]] = (), any_part: bool = False
) -> RunResult:
    series = MetricsSeries((tmp_path or Path("/nowhere")) / "metrics.jsonl")
    for row in rows:
        series.add(row)
    stamped = (
        event if event.at.year > 1 else event.model_copy(update={"at": at(place)})
        for place, event in enumerate(recorded, 10)
    )
    return run_result(fold([RunPlanned(at=START, run=RUN, nonce="n"), *stamped]), series, at(1000), any_part=any_part)


def validation(iteration: int, loss: float) -> dict[str, object]:
    return {"kind": "val", "attempt": 1, "iteration": iteration, "val_loss": loss}


def checkpoint(made: RunResult) -> list[tuple[str, str]]:
    return [(file.node, file.name) for file in made.newest("checkpoint")]


def test_the_newest_weights_and_the_best_are_files_that_mlx_lm_loads_where_they_are_fetched_to() -> None:
    made = result(
        None,
        attempt(),
        weights(10, "0000010_adapters.safetensors", "adapter_config.json"),
        weights(10, "best_adapters.safetensors", "adapter_config.json", val_loss=1.5),
        weights(20, "0000020_adapters.safetensors", "adapter_config.json"),
    )
    (file, config), (best, _) = made.newest("adapter"), made.newest("adapter", best=True)
    path = "/home/ana/adapters/0000020_adapters.safetensors"
    assert file == ResultFile("adapter", False, 20, "ana", path, "adapters.safetensors", 7, f"{20:064x}")
    assert (config.name, best.name, best.iteration) == ("adapter_config.json", "adapters.safetensors", 10)
    assert best.path.endswith("best_adapters.safetensors")


def test_the_losses_are_those_of_the_curve_and_the_base_is_that_before_the_first_update() -> None:
    started = TrainingStarted(attempt=1, versions={"mlx": "1"}, inputs={"train.jsonl": "crc32 1"}, from_base=True)
    rows = [validation(0, 5.0), validation(10, 2.0), validation(20, 3.0)]
    rows.append({"kind": "train", "attempt": 1, "iteration": 20, "trained_tokens": 1234})
    made = result(None, attempt(), started, rows=rows)
    assert [made.first, made.best, made.last] == [ValidationLoss(*point) for point in ((0, 5.0), (10, 2.0), (20, 3.0))]
    assert (made.base, made.tokens, made.inputs["train.jsonl"]) == (5.0, 1234, "crc32 1")
    adapter = started.model_copy(update={"from_base": False})
    assert result(None, attempt(), adapter, rows=rows).base is None, "it went on with an adapter"
    assert result(None, attempt(), started, rows=rows[1:]).base is None


def test_an_older_releases_run_has_its_losses_and_no_files() -> None:
    made = result(None, attempt(), StateSaved(rank=0, state="4.0", manifest="0" * 64), rows=[validation(0, 5.0)])
    assert (made.files, made.base, made.first, made.inputs) == ((), None, ValidationLoss(0, 5.0), {})


def test_the_time_is_that_of_all_attempts_without_the_pauses_between_them() -> None:
    ended = StateChanged(at=at(160), state=RunState.ABORTED)
    assert result(None).seconds is None, "nothing was launched"
    assert result(None, attempt(1, 0), attempt(2, 100), ended).seconds == 160 + 60, "an end that is not known"


def test_the_energy_is_that_of_all_nodes_with_a_sensor_and_per_million_tokens() -> None:
    measured = [EnergyMeasured(node=node, joules=joules, seconds=9.0) for node, joules in (("ana", 5.0), ("bea", 7.0))]
    assert result(None, attempt()).energy is None
    assert result(None, attempt(), *measured).energy == Energy(12.0, 18.0, ("ana", "bea"), None)
    rows = [{"kind": "train", "attempt": 1, "iteration": 20, "trained_tokens": 2000}]
    both = result(None, attempt(), *measured, attempt(2), measured[0], rows=rows).energy
    assert both == Energy(17.0, 27.0, ("ana", "bea"), 8500.0)


def test_the_newest_complete_state_has_every_part_once_from_its_node() -> None:
    both = [state(10, 0, 2), state(20, 0, 2), state(10, 1, 2)]
    names = [(f"n{part}", f"part{part}/step-000000010/weights") for part in (0, 1)]
    assert checkpoint(result(None, attempt(), *both)) == names
    assert checkpoint(result(None, attempt(), *both, state(30, 0, 1))) == [("n0", "step-000000030/weights")]


def test_an_emergency_checkpoint_counts_until_the_run_has_succeeded() -> None:
    saved = [attempt(), state(10, 0, 1), state(17, 1, 1, author="@1.1")]
    assert [file.iteration for file in result(None, *saved).newest("checkpoint")] == [17]
    ended = StateChanged(at=at(90), state=RunState.SUCCEEDED)
    assert [file.iteration for file in result(None, *saved, ended).newest("checkpoint")] == [10]


def test_parts_of_two_attempts_are_no_state() -> None:
    """The second one has resumed from an earlier update, and replaces what was saved after it."""
    former = [state(10, part, 2, digest="a") for part in (0, 1)] + [state(20, part, 2, digest="a") for part in (0, 1)]
    anew = [state(20, part, 2, digest="b") for part in (0, 1)]
    made = result(None, attempt(), *former, attempt(2), *anew)
    assert {file.sha256[0] for file in made.newest("checkpoint")} == {"b"}


def test_of_a_state_of_which_each_part_is_whole_one_part_is_the_result() -> None:
    def newest(*recorded: Event) -> list[tuple[str, int]]:
        files = result(None, *recorded, any_part=True).newest("checkpoint")
        return [(file.node, file.iteration) for file in files]

    all_nodes = attempt(nodes=("n0", "n1", "n2"))
    saved = [all_nodes, *(state(10, part, 3) for part in range(3)), state(20, 1, 3), state(20, 2, 3)]
    assert newest(*saved[:4]) == [("n0", 10)]
    assert newest(*saved) == [("n1", 20)], "what only some have saved"
    assert newest(*saved, state(12, 0, 3)) == [("n1", 20)], "a rank that is behind"
    lost = NodeConditionChanged(node="n1", condition="lost")
    assert newest(*saved, lost) == [("n2", 20)]
    assert newest(*saved, attempt(2, 50, ("n0", "n2"))) == [("n2", 20)], "the node is left out"
    anew = [attempt(2, 50, ("n0", "n2")), state(12, 0, 3).model_copy(update={"at": at(60)})]
    assert newest(*saved, *anew) == [("n0", 12)], "it was gone on from an earlier one"


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_however_late_the_events_of_a_rank_come_the_newest_complete_state_is_the_same(
    parts: int, updates: int, data: st.DataObject
) -> None:
    waiting = [[state(update, part, parts) for update in range(1, updates + 1)] for part in range(parts)]
    recorded: list[StateSaved] = []
    while any(waiting):
        recorded.append(data.draw(st.sampled_from([queue for queue in waiting if queue])).pop(0))
        complete = _complete(recorded, parts)
        files = result(None, attempt(), *recorded).newest("checkpoint")
        assert {file.iteration for file in files} == ({complete} if complete else set())
        assert len(files) == (parts if complete else 0)


def _complete(recorded: Sequence[StateSaved], parts: int) -> int:
    updates = [int(event.state.split(".")[0]) for event in recorded]
    return max((update for update in updates if updates.count(update) == parts), default=0)
