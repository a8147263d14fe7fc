"""The Engine: finding runs, refusals before anything happens, and what is left on disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from engine.api import Engine
from engine.api.launches import run_id
from engine.config.models import PreflightConfig
from engine.errors import InputError, RunNotFound
from engine.models import CheckResult, CheckStatus, RunState
from engine.run.events import NodesExcluded
from engine.run.run_plan import RunPlan, read_plan, read_plan_and_damage
from engine.store.layout import RunDir
from engine.store.store import Store
from tests.unit.run.run_maker import START, MadeRun, make_run_config, report


def test_what_is_accepted_is_the_text_that_was_parsed_and_shown(home: Path, tmp_path: Path) -> None:
    file, hosts = tmp_path / "flightdeck.toml", tmp_path / "hosts"
    file.write_text('[cluster]\nhostfile = "hosts"\n[node_defaults]\npython = "/x/python"\n[job]\ncommand = ["true"]\n')
    hosts.write_text("ultra:1\n")
    nodes, shown = Engine(home).nodes, Engine(home).load_config(file)
    assert not nodes.is_accepted(shown)
    # While the question is open.
    file.write_text(file.read_text().replace("/x/", "/evil/"))
    nodes.accept(shown.digest)
    assert (nodes.is_accepted(shown), nodes.is_accepted(Engine(home).load_config(file))) == (True, False)
    file.write_text(file.read_text().replace("/evil/", "/x/"))
    assert nodes.is_accepted(Engine(home).load_config(file))
    hosts.write_text("other:1\n")
    assert not nodes.is_accepted(Engine(home).load_config(file))


def three_runs(home: Path) -> list[MadeRun]:
    """Oldest first: two of the name "job", then one called "other"."""
    names = ("job", "job", "other")
    runs = [
        MadeRun(home, name=name, number=number, created=START + timedelta(hours=number)).close()
        for number, name in enumerate(names)
    ]
    for run in runs[:2]:
        Store(home).put_run(run.plan.record())
    return runs


def test_a_run_is_found_by_id_prefix_name_and_last(home: Path) -> None:
    first, second, third = three_runs(home)
    engine = Engine()
    assert engine.runs.find(first.id).id == first.id
    assert engine.runs.find(third.id[:14]).id == third.id
    assert engine.runs.find("job").id == second.id
    assert engine.runs.find("last").id == third.id


def test_a_prefix_of_several_runs_is_refused_with_their_ids(home: Path) -> None:
    first, second, _ = three_runs(home)
    with pytest.raises(RunNotFound, match=f"3 ids begin with it: .*{second.id}, {first.id}"):
        Engine().runs.find("2026")


@pytest.mark.parametrize("run", ["", "nothing", "../runs", "/etc"])
def test_what_is_no_run_is_not_found(home: Path, run: str) -> None:
    three_runs(home)
    with pytest.raises(RunNotFound):
        Engine().runs.find(run)


def test_runs_are_newest_first_and_those_that_the_store_forgot_are_among_them(home: Path) -> None:
    runs = three_runs(home)
    assert [record.id for record in Engine().runs.all()] == [run.id for run in reversed(runs)]


def test_the_journal_is_believed_before_the_store(home: Path) -> None:
    run = MadeRun(home)
    Store(home).put_run(run.plan.record())
    engine = Engine()
    run.state("preflight", "launching").attempt().state("running").metrics([report(10, 2.5)])
    assert [(record.state, record.train_loss) for record in engine.runs.all()] == [(RunState.RUNNING, 2.5)]
    run.state("finishing", "failed", reason="rank_failed").close()
    assert engine.runs.all()[0].state is RunState.FAILED
    assert engine.runs.record("last").state is RunState.FAILED


def test_the_plan_of_a_run_that_goes_on_is_read_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plans = MadeRun(home).close(), []
    Store(home).put_run(run.plan.record())

    def read(path: Path) -> tuple[RunPlan, str | None]:
        plans.append(path)
        return read_plan_and_damage(path)

    monkeypatch.setattr("engine.run.watch.read_plan_and_damage", read)
    engine = Engine()
    for _ in range(3):
        assert [record.state for record in engine.runs.all()] == [RunState.PLANNED]
    assert plans == [run.directory.plan]


async def test_a_launched_run_is_reported_although_the_store_can_no_longer_be_read(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(directory: RunDir) -> None:
        (home / "state.json").unlink()
        (home / "state.json").mkdir()

    monkeypatch.setattr("engine.api.launches.start_supervisor", start)
    record = await Engine().launches.launch(make_run_config())
    assert (record.name, record.state) == ("job", RunState.PLANNED)


async def test_a_run_is_resumed_without_the_nodes_that_its_journal_excludes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MadeRun(home)
    run.append(NodesExcluded(nodes=("node0",), why="it differs", world_size=1))
    run.state("preflight", "failed", reason="preflight_failed").close()
    locked: list[Sequence[str]] = []

    @contextlib.contextmanager
    def shared_hosts(home: Path, hosts: Sequence[str]) -> Iterator[None]:
        locked.append(hosts)
        yield

    monkeypatch.setattr("engine.api.launches.shared_hosts", shared_hosts)
    monkeypatch.setattr("engine.api.launches.resume_run", lambda directory, **_: None)
    monkeypatch.setattr("engine.api.runs.diagnose", lambda directory: pytest.fail("nobody asked why it failed"))
    record = await Engine().launches.resume(run.id)
    assert (record.excluded, len(locked[0])) == (["node0"], 1)


def test_a_run_id_is_its_time_its_name_and_four_digits() -> None:
    made = run_id("qwen-support", START)
    assert made.startswith("20260102-030405-qwen-support-")
    assert len(made.rsplit("-", 1)[1]) == 4


@pytest.mark.parametrize("name", ["", "../x", "a b", "-rf", "x\n", "a/b", "é"])
def test_a_name_that_could_be_more_than_a_name_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        run_id(name, START)


async def test_an_unknown_check_to_skip_is_refused_before_anything_is_made(home: Path) -> None:
    with pytest.raises(InputError, match="no such check"):
        await Engine().launches.launch(make_run_config(), skip=["typo"])
    assert not (home / "runs").exists()


def test_checks_to_skip_come_from_both_places_once(home: Path) -> None:
    config = make_run_config().model_copy(update={"preflight": PreflightConfig(skip=("ports_free",))})
    run_dir = Engine().launches.make(config, ("gradient_layer", "ports_free"))
    assert read_plan(run_dir.plan).skip == ("ports_free", "gradient_layer")


async def test_preflight_streams_and_can_be_left_in_the_middle(home: Path) -> None:
    engine, config = Engine(), make_run_config()
    stream = engine.checks.preflight(config, skip=["gradient_layer"])
    results: list[CheckResult] = []
    async for result in stream:
        results.append(result)
    by_name = {result.name: result for result in results}
    assert by_name["model_present"].status is CheckStatus.FAIL
    assert by_name["gradient_layer"].summary == "overridden"
    assert engine.checks.report(config, results, skip=["gradient_layer"]).overall_status is CheckStatus.FAIL
    again = engine.checks.preflight(config)
    assert isinstance(again, AsyncGenerator)
    # What does not apply is said first; then something runs, and is left.
    while (await anext(again)).status is not CheckStatus.RUNNING:
        continue
    await again.aclose()
    audit = [json.loads(line) for line in (home / "audit.jsonl").read_text().splitlines()]
    assert {(entry["event_type"], entry["context"]["check"]) for entry in audit} >= {
        ("preflight_override", "gradient_layer"),
        ("preflight_failure", "model_present"),
    }


async def test_preflight_of_an_unknown_skip_raises_where_it_is_used(home: Path) -> None:
    with pytest.raises(InputError, match="no such check"):
        async for _ in Engine().checks.preflight(make_run_config(), skip=["typo"]):
            pass


async def test_aborting_a_run_that_has_ended_is_nothing_to_do(home: Path) -> None:
    run = MadeRun(home).state("preflight", "failed", reason="preflight_failed").close()
    assert [progress async for progress in Engine().runs.abort(run.id)] == []
    assert list(run.directory.path.glob("requests/*")) == []


def test_metrics_leave_out_what_the_head_adds(home: Path) -> None:
    MadeRun(home).metrics([report(10, 2.5)]).close()
    rows = Engine().runs.metrics("last")
    assert [set(row) & {"kind", "attempt", "at"} for row in rows] == [set()]


def test_constructing_an_engine_touches_nothing(home: Path) -> None:
    Engine()
    assert not home.exists()


def test_a_destroyed_state_is_said_and_filled_again_from_the_run_directories(home: Path) -> None:
    runs = three_runs(home)
    for state in home.glob("state.json*"):
        state.write_bytes(b"\0" * 100)
    engine = Engine()
    assert [record.id for record in engine.runs.all()] == [run.id for run in reversed(runs)]
    assert engine.notices
    assert {record.id for record in Store(home).runs()} == {run.id for run in runs}
