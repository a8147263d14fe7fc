"""pre_rdma_sync runs the user's script and reports its output; only the comparison of the workdirs decides."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from engine.checks import gradient, sync
from engine.checks.context import CheckContext
from engine.checks.runner import run_checks
from engine.checks.sync import LAST_LINES, TreeDifference, WorkdirComparison, last_lines
from engine.cluster.probe_results import WorkdirTree
from engine.cluster.transport.local import LocalTransport
from engine.config.models import Config, PreflightConfig
from engine.models import CheckResult, CheckStatus
from engine.node.processes import start_time
from tests.checks.conftest import fleet_of, run_check, run_fix

pytestmark = pytest.mark.usefixtures("shared_agent")


def test_a_link_where_the_reference_has_a_folder_is_blocking() -> None:
    found = TreeDifference(missing=("data/a/x.txt", "data/y.txt", "new.txt"), extra=("data", "data2", "notes.txt"))
    assert found.blocking == ("data",)
    assert TreeDifference(missing=("data.txt",), extra=("data",)).blocking == ()
    assert TreeDifference(extra=("data",)).blocking == ()


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, beside the workdirs."""
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def script(user: Path) -> Path:
    return write(user / "Dev" / "sync-dev.sh", "echo synced")


@pytest.fixture
def two(config: Config, tmp_path: Path) -> Config:
    """Two workdirs of one content."""
    nodes = []
    for node in config.nodes:
        folder = tmp_path / node.name
        (folder / "src").mkdir(parents=True)
        (folder / "src" / "train.py").write_text("print(1)\n")
        (folder / "link").symlink_to("src/train.py")
        nodes.append(node.model_copy(update={"workdir": str(folder)}))
    return config.model_copy(update={"nodes": tuple(nodes)})


def write(path: Path, body: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(mode)
    return path


def with_preflight(config: Config, **preflight: object) -> Config:
    return config.model_copy(update={"preflight": config.preflight.model_copy(update=preflight)})


def workdir(config: Config, rank: int) -> Path:
    return Path(config.nodes[rank].workdir)


async def test_a_script_that_succeeds_and_equal_trees_pass(two: Config, script: Path) -> None:
    result = await run_check(sync.run, two)
    assert (result.status, result.summary) == (
        CheckStatus.PASS,
        "sync-dev.sh: success; 1 of 1 trees are the same as on node0",
    )
    assert result.evidence["this machine"] == "synced"
    assert result.detail is not None and result.detail.kind == "pre_rdma_sync"
    assert (result.detail.sync_status, result.detail.sync_output) == ("success", ("synced",))
    assert CheckResult.model_validate_json(result.model_dump_json()) == result


async def test_a_script_that_only_claims_success_is_detected_and_its_fix_works(two: Config, script: Path) -> None:
    (workdir(two, 1) / "src" / "train.py").write_text("print(2)\n")
    (workdir(two, 0) / ".hidden").write_text("here alone")
    result = await run_check(sync.run, two)
    assert result.status is CheckStatus.FAIL
    assert (
        "node1 is missing 1 file that node0 has: .hidden; 1 file on node1 differs from node0: src/train.py"
        in result.summary
    )
    assert result.blames == (1, "node1")
    await run_fix(result.fix_command)
    assert (await run_check(sync.run, two)).status is CheckStatus.PASS


def test_the_effect_of_a_fix_tells_of_a_copy_only_where_it_makes_one(config: Config) -> None:
    first, other = config.nodes
    trees = {
        first.name: WorkdirTree(entries={}, left=[]),
        other.name: WorkdirTree(problem="not allowed", permit="/secret"),
    }
    compared = WorkdirComparison(first, trees, {}, {}, {other.name: "not allowed"})
    result = sync.evaluate(config, sync.SyncScriptOutcome("success", "synced"), compared)
    assert result.fix_command == "chmod u+rX /secret"
    assert result.fix_effect == "lets its owner read it; chmod u-r takes that back"


@pytest.mark.parametrize("name", [".git/index", "pkg/__pycache__/a.cpython-311.pyc", "env/pyvenv.cfg", ".DS_Store"])
async def test_what_each_machine_has_of_its_own_is_no_difference(two: Config, script: Path, name: str) -> None:
    path = workdir(two, 0) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    assert (await run_check(sync.run, two)).status is CheckStatus.PASS


@pytest.mark.needs("linux")
async def test_files_whose_names_are_not_utf_8_are_compared_each_by_its_own(two: Config, script: Path) -> None:
    for rank in (0, 1):
        for name in ("a\udcff", "a\udcfe"):
            (workdir(two, rank) / name).write_text("the same")
    assert (await run_check(sync.run, two)).status is CheckStatus.PASS
    (workdir(two, 1) / "a\udcff").write_text("another")
    assert r"1 file on node1 differs from node0: a\udcff" in (await run_check(sync.run, two)).summary
    (workdir(two, 1) / "a\udcff").write_text("the same")
    for rank in (0, 1):
        (long := workdir(two, rank) / ("\udcff" * 60)).mkdir()
        for number in range(3):
            (long / f"{number}.txt").write_text("the same")
    (workdir(two, 1) / ("\udcff" * 60) / "1.txt").write_text("another")
    assert "1 file on node1 differs" in (await run_check(sync.run, two)).summary
    environment = workdir(two, 0) / "env\udcff"
    environment.mkdir()
    (environment / "pyvenv.cfg").write_text("mine")
    assert (await run_check(sync.run, two)).fix_command is None, "it would be copied with the rest"


async def test_what_a_node_has_beyond_the_reference_is_reported_and_stays(two: Config, script: Path) -> None:
    (workdir(two, 1) / "output.log").write_text("mine")
    result = await run_check(sync.run, two)
    assert result.status is CheckStatus.PASS
    assert "1 only there (output.log)" in result.evidence["node1"]


async def test_a_link_that_leads_elsewhere_is_a_difference(two: Config, script: Path) -> None:
    (workdir(two, 1) / "link").unlink()
    (workdir(two, 1) / "link").symlink_to("elsewhere")
    assert "1 file on node1 differs from node0: link" in (await run_check(sync.run, two)).summary


async def test_a_workdir_that_is_missing_comes_with_what_makes_it(two: Config, script: Path) -> None:
    workdir(two, 1).rename(workdir(two, 1).with_name("away"))
    result = await run_check(sync.run, two)
    assert result.status is CheckStatus.FAIL
    assert "is not there" in result.summary
    await run_fix(result.fix_command)
    assert (await run_check(sync.run, two)).status is CheckStatus.PASS


async def test_a_bare_home_is_not_read_and_nothing_is_claimed_of_it(two: Config, script: Path, user: Path) -> None:
    nodes = (two.nodes[0], two.nodes[1].model_copy(update={"workdir": str(user)}))
    result = await run_check(sync.run, two.model_copy(update={"nodes": nodes}), own_agent=True)
    assert result.status is CheckStatus.WARN
    assert "not compared on node1: the workdir is a bare home" in result.summary


async def test_a_missing_script_is_said_only_where_one_is_wanted(two: Config) -> None:
    result = await run_check(sync.run, two)
    assert (result.status, result.summary) == (CheckStatus.PASS, "1 of 1 trees are the same as on node0")
    own = two.model_copy(update={"job": two.job.model_copy(update={"command": ("python", "train.py")})})
    for wanted in (own, with_preflight(two, sync_script="~/Dev/sync-dev.sh")):
        result = await run_check(sync.run, wanted)
        assert result.status is CheckStatus.WARN
        assert result.summary.startswith("no sync script ~/Dev/sync-dev.sh")
    (workdir(two, 1) / "src" / "train.py").write_text("print(2)\n")
    differing = await run_check(sync.run, two)
    assert differing.status is CheckStatus.WARN
    assert "on node1 differs from node0" in differing.summary


async def test_a_script_that_fails_blocks_with_its_last_lines(two: Config, script: Path) -> None:
    write(script, "for n in $(seq 50); do echo line $n; done; echo no space >&2; exit 23")
    result = await run_check(sync.run, two)
    assert result.status is CheckStatus.FAIL
    assert "sync-dev.sh ended with 23: no space" in result.summary
    lines = result.evidence["this machine"].splitlines()
    assert (len(lines), lines[0], lines[-1]) == (LAST_LINES, "line 32", "no space")
    assert result.detail is not None and result.detail.kind == "pre_rdma_sync"
    assert result.detail.sync_status == "failed"
    lenient = await run_check(sync.run, with_preflight(two, block_on_failure=False))
    assert lenient.status is CheckStatus.WARN


@pytest.mark.parametrize("mode", [0o644, 0o600])
async def test_a_script_that_may_not_be_executed_comes_with_its_chmod(two: Config, script: Path, mode: int) -> None:
    script.chmod(mode)
    result = await run_check(sync.run, two)
    assert (result.status, result.summary) == (CheckStatus.FAIL, f"{script} may not be executed")
    assert result.fix_command == f"chmod u+rx {script}"
    await run_fix(result.fix_command)
    assert (await run_check(sync.run, two)).status is CheckStatus.PASS


async def test_a_script_without_its_first_line_is_run_as_a_shell_would(two: Config, script: Path) -> None:
    script.write_text("echo by the shell\n")
    result = await run_check(sync.run, two)
    assert (result.status, result.evidence["this machine"]) == (CheckStatus.PASS, "by the shell")


@pytest.mark.parametrize(
    "path", ["~/Dev/../../etc/sync.sh", "/etc/passwd", "~/a\0b", "~/$(id).sh", "-rf", "a" * 5000, "~/out/sync.sh"]
)
async def test_a_script_outside_of_the_allowed_roots_is_not_run(
    two: Config, user: Path, tmp_path: Path, path: str
) -> None:
    (tmp_path / "outside").mkdir()
    write(tmp_path / "outside" / "sync.sh", f"touch {tmp_path}/ran")
    (user / "out").symlink_to(tmp_path / "outside")
    result = await run_check(sync.run, with_preflight(two, sync_script=path))
    assert (result.status, result.detail and result.detail.kind) == (CheckStatus.FAIL, "pre_rdma_sync")
    assert result.summary.startswith("[preflight] sync_script: ")
    assert not (tmp_path / "ran").exists()
    allowed = with_preflight(two, sync_script="~/out/sync.sh", roots=(str(tmp_path / "outside"),))
    assert (await run_check(sync.run, allowed)).status is CheckStatus.PASS


@pytest.mark.usefixtures("quick_end")
async def test_a_script_over_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    script = write(tmp_path / "slow.sh", f"sleep 600 & echo $! > {tmp_path}/child; echo waiting; wait")
    lines: list[str] = []
    ran = await LocalTransport().run([str(script)], timeout_s=3.0, on_line=lines.append)
    assert (ran.code, last_lines(ran), lines) == (None, ("waiting",), ["waiting"])
    assert start_time(int((tmp_path / "child").read_text())) is None


@pytest.mark.usefixtures("quick_end")
async def test_cancelling_ends_the_script_with_its_children(tmp_path: Path) -> None:
    script = write(tmp_path / "slow.sh", f"sleep 600 & echo $! > {tmp_path}/child; echo waiting; wait")
    started = asyncio.Event()
    running = asyncio.create_task(LocalTransport().run([str(script)], timeout_s=60, on_line=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert start_time(int((tmp_path / "child").read_text())) is None


async def test_a_child_that_stays_behind_keeps_nobody_waiting(tmp_path: Path) -> None:
    script = write(tmp_path / "daemon.sh", "sleep 600 & echo $!")
    ran = await asyncio.wait_for(LocalTransport().run([str(script)], timeout_s=60, on_line=lambda _: None), 20)
    assert ran.code == 0
    os.kill(int(last_lines(ran)[0]), 9)


async def test_the_running_check_shows_the_last_line_without_escapes(
    two: Config, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script goes on when its line is shown."""
    monkeypatch.setattr(sync, "_PROGRESS_EVERY_S", 0.0)
    shown = f"until [ -e {tmp_path}/$1 ]; do sleep 0.05; done"
    write(script, f"await() {{ {shown}; }}; echo one; await one; printf '\\033[31mtwo\\033[0m\\n'; await two")
    lines: list[str] = []

    def show(_: str, message: str) -> None:
        lines.append(message)
        if message in ("one", "two"):
            (tmp_path / message).touch()

    async with fleet_of(two) as fleet:
        context = CheckContext(two, fleet)
        context.progress = show
        await sync.run(context)
        await context.close()
    assert lines[:2] == ["one", "two"]


async def test_switched_off_it_is_a_skip_that_the_audit_log_tells_of(two: Config) -> None:
    audited: list[tuple[str, str, dict[str, object]]] = []
    remote = two.model_copy(update={"nodes": (two.nodes[0], two.nodes[1].model_copy(update={"ssh": "mac"}))})
    async with fleet_of(remote) as fleet:
        report = await run_checks(
            CheckContext(with_preflight(remote, sync=False), fleet),
            on_result=lambda _: None,
            checks={sync.NAME: sync.CHECK},
            audit=lambda event, status, context: audited.append((event, status, context)),
        )
    assert (report.checks[0].status, report.checks[0].summary) == (
        CheckStatus.SKIP,
        "switched off: [preflight] sync = false",
    )
    assert [(event, status, context["check"]) for event, status, context in audited] == [
        ("preflight_warning", "skip", sync.NAME)
    ]


def test_a_cluster_of_this_machine_has_nothing_to_sync(config: Config) -> None:
    assert sync.CHECK.not_applicable(config) is not None
    assert sync.NAME in gradient.CHECK.needs
    assert PreflightConfig().sync_script == "~/Dev/sync-dev.sh"
