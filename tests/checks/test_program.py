"""program_present looks for a job's own command where the rank would."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checks import program as check
from engine.config.models import Config
from engine.errors import InputError
from engine.models import CheckStatus
from tests.checks.conftest import run_check

pytestmark = pytest.mark.usefixtures("shared_agent")


def with_command(config: Config, *command: str) -> Config:
    return config.model_copy(update={"job": config.job.model_copy(update={"command": command})})


async def test_the_nodes_own_python_runs_a_script_of_its_workdir(config: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    result = await run_check(check.run, with_command(config, "python", "mine.py", "--fast"))
    assert result.status is CheckStatus.PASS
    assert result.evidence["node1"] == f"{config.nodes[1].python} {tmp_path / 'mine.py'}"


async def test_placeholders_stand_for_this_nodes_paths(config: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    result = await run_check(check.run, with_command(config, "{python}", "{workdir}/mine.py"))
    assert result.evidence["node0"] == f"{config.nodes[0].python} {tmp_path / 'mine.py'}"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("python", "theirs.py"), "theirs.py is not there"),
        (("no-such-program-here",), "no program no-such-program-here on PATH"),
        (("./run.sh",), "run.sh is not there"),
    ],
)
async def test_what_is_missing_is_named(config: Config, command: tuple[str, ...], message: str) -> None:
    result = await run_check(check.run, with_command(config, *command))
    assert result.status is CheckStatus.FAIL
    assert message in result.summary


async def test_a_script_that_may_not_be_executed_comes_with_its_chmod(config: Config, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    result = await run_check(check.run, with_command(config, "./run.sh"))
    assert result.fix_command == f"chmod +x {tmp_path / 'run.sh'}"


@pytest.mark.needs("linux")
async def test_a_script_in_a_folder_whose_name_is_not_utf_8_is_found(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "a\udcff"
    folder.mkdir()
    (folder / "mine.py").write_text("")
    (tmp_path / "mine.py").symlink_to(folder / "mine.py")
    result = await run_check(check.run, with_command(config, "python", "mine.py"))
    assert result.status is CheckStatus.PASS, result


async def test_a_script_by_a_path_that_leads_back_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(InputError, match=r"a path without \.\."):
        await run_check(check.run, with_command(config, "python", "src/../mine.py"))


async def test_a_script_outside_of_home_and_workdir_needs_leave(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("work", "me", "outside"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "outside" / "mine.py").write_text("")
    (tmp_path / "work" / "linked.py").symlink_to(tmp_path / "outside" / "mine.py")
    nodes = tuple(node.model_copy(update={"workdir": str(tmp_path / "work")}) for node in config.nodes)
    for script in ("linked.py", str(tmp_path / "outside" / "mine.py")):
        there = with_command(config.model_copy(update={"nodes": nodes}), "python", script)
        result = await run_check(check.run, there)
        assert result.status is CheckStatus.FAIL
        assert f"{tmp_path / 'outside' / 'mine.py'} is outside of the home and the workdir" in result.summary
        allowed = config.preflight.model_copy(update={"roots": (str(tmp_path / "outside"),)})
        result = await run_check(check.run, there.model_copy(update={"preflight": allowed}))
        assert result.status is CheckStatus.PASS
