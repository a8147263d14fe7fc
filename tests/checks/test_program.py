"""program_present looks for a job's own command where the rank would."""

from __future__ import annotations

import errno
import shutil
import sys
from pathlib import Path

import pytest

from engine.checks import program as check
from engine.config.models import Config
from engine.errors import InputError
from engine.models import CheckStatus
from engine.node.probes import files
from engine.node.processes import abandoned_locks, find_program
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
        (("no-such-program-here",), "no program no-such-program-here beside "),
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


@pytest.mark.parametrize(
    ("command", "file", "fix"),
    [
        (("mine.py",), ("#!/usr/bin/env python\n", 0o700), '["python", "mine.py"]'),
        (("mine.py", "--fast"), ("", 0o600), '["python", "mine.py", …]'),
        (("./mine.py",), ("#!/usr/bin/env python\n", 0o600), '["python", "./mine.py"]'),
        (("./mine.py",), ("import mlx\n", 0o700), '["python", "./mine.py"]'),
    ],
    ids=["not on PATH", "with arguments", "no permission", "no interpreter"],
)
async def test_a_python_script_that_is_no_program_is_named_with_the_command_that_runs_it(
    config: Config, tmp_path: Path, command: tuple[str, ...], file: tuple[str, int], fix: str
) -> None:
    (tmp_path / "mine.py").write_text(file[0])
    (tmp_path / "mine.py").chmod(file[1])
    result = await run_check(check.run, with_command(config, *command))
    assert result.status is CheckStatus.FAIL
    assert f"{tmp_path / 'mine.py'} is no program by itself: write command = {fix}" in result.summary


def test_a_python_script_that_cannot_be_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "mine.py").write_text("#!/bin/sh\n")
    (tmp_path / "mine.py").chmod(0o711)
    monkeypatch.setattr(Path, "open", refuse)
    fault = files._program(tmp_path, sys.executable, [], "./mine.py")["fault"]
    assert fault == f"{tmp_path / 'mine.py'} may not be read: Permission denied"


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


async def test_a_console_script_is_found_beside_the_nodes_python(config: Config, tmp_path: Path) -> None:
    scripts = tmp_path / "venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "python").symlink_to(config.nodes[0].python)
    (scripts / "own-lora").write_text("#!/bin/sh\n")
    (scripts / "own-lora").chmod(0o700)
    nodes = tuple(node.model_copy(update={"python": str(scripts / "python")}) for node in config.nodes)
    there = config.model_copy(update={"nodes": nodes})
    result = await run_check(check.run, with_command(there, "own-lora", "--train"))
    assert result.evidence.get("node0") == str(scripts / "own-lora"), result
    assert find_program("own-lora", str(scripts / "python")) == str(scripts / "own-lora")
    assert find_program("sh", str(scripts / "python")) == shutil.which("sh")


async def test_a_console_script_that_is_nowhere_is_named_with_node_and_fix(config: Config) -> None:
    result = await run_check(check.run, with_command(config, "axolotl", "train", "x.yaml"))
    assert result.status is CheckStatus.FAIL and "axolotl beside" in result.summary
    assert result.fixes.keys() == {"node0", "node1"}
    assert all(fix.endswith("axolotl") and "pip install" in fix for fix in result.fixes.values())


@pytest.mark.parametrize(
    ("command", "text", "status"),
    [
        (("bash", "run.sh"), "#!/bin/sh\ntorchrun --standalone t.py\n", CheckStatus.FAIL),
        (("./run.sh", "2"), "#!/usr/bin/env bash\nset -e\nmpirun python t.py\n", CheckStatus.FAIL),
        (("env", "A=1", "sh", "-e", "run.sh"), "torchrun --nnodes 2 --rdzv-endpoint=h:1 t.py", CheckStatus.WARN),
        (("bash", "run.sh"), "torchrun --node-rank=$RANK --master-addr $MASTER_ADDR t.py", CheckStatus.PASS),
        (("sh", "-c", "torchrun t.py"), "", CheckStatus.FAIL),
        (("tune", "run", "--nproc_per_node", "2", "lora"), "", CheckStatus.FAIL),
        (("python", "t.py"), "", CheckStatus.PASS),
    ],
)
async def test_a_launcher_inside_the_command_is_said_with_its_fix(
    config: Config, tmp_path: Path, command: tuple[str, ...], text: str, status: CheckStatus
) -> None:
    (tmp_path / "run.sh").write_text(text)
    (tmp_path / "run.sh").chmod(0o700)
    (tmp_path / "t.py").write_text("")
    given = with_command(config, *command)
    result = await run_check(check.run, given)
    assert result.status is status, result
    if status is not CheckStatus.PASS:
        assert "a group of its own" in result.summary and "write" in result.summary
    one = given.model_copy(update={"nodes": config.nodes[:1]})
    if command[0] != "tune":
        assert (await run_check(check.run, one)).status is CheckStatus.PASS


@pytest.mark.needs("linux")
async def test_a_lock_that_a_killed_build_has_left_is_named_and_one_in_use_is_not(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.py").write_text("")
    locks = [tmp_path / "torch_extensions" / "py312_cpu" / name / "lock" for name in ("left", "held")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = with_command(config, "torchrun", "t.py")
    given = given.model_copy(update={"job": given.job.model_copy(update={"framework": "torch"})})
    with locks[1].open():
        assert abandoned_locks() == [str(locks[0])]
        result = await run_check(check.run, given, own_agent=True)
    assert result.status is CheckStatus.WARN, result
    assert str(locks[0]) in result.summary and str(locks[1]) not in result.summary
    assert result.fix_command is not None and f"rm {locks[0]}" in result.fix_command
