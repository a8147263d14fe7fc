"""A project folder whose files are named as modules that we import: no command, probe or keeper run there loads one."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from engine.launch.start_script import start_script
from engine.protocol.attempt import NONCE_ENV, AttemptSpec, NodeFiles, RankSpec, read_exit, write_atomic
from tests.agent.keeper_runner import stage_bundle
from tests.tui.commands import shell
from tests.waiting import wait_until

MODULES = (
    *("json", "logging", "mlx", "mlx_lm", "torch", "transformers", "typing", "subprocess", "random", "dataclasses"),
    *("pathlib", "numpy", "pydantic", "engine", "tui", "site", "sitecustomize", "usercustomize"),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'a').write({name!r} + ' ')\n")
    return folder


def loaded(project: Path) -> str:
    marker = project.with_name("loaded")
    return marker.read_text() if marker.exists() else ""


def test_that_such_a_module_is_loaded_is_seen(project: Path) -> None:
    subprocess.run([sys.executable, "-c", "import mlx"], cwd=project, check=True)
    assert loaded(project) == "mlx "


@pytest.mark.parametrize("framework", ["mlx", pytest.param("torch", marks=pytest.mark.slow)])
def test_commands_and_the_agents_probes(home: Path, project: Path, framework: str) -> None:
    job = f'[job]\nframework = "{framework}"\ncommand = ["python", "train.py"]\n'
    (project / "flightdeck.toml").write_text(f'[[node]]\nname = "a"\n{job}')
    (project / "train.py").write_text("print('up')\n")
    for command in ("nodes", "plan", "runs"):
        done = shell(home, command, cwd=project)
        assert "Traceback" not in done.err and done.out
        assert loaded(project) == "", command


def test_a_keeper_as_its_script_starts_it(tmp_path: Path, project: Path) -> None:
    files = NodeFiles.for_attempt(tmp_path / "node", "run", 1)
    files.directory.mkdir(parents=True)
    nonce = uuid.uuid4().hex
    own = RankSpec(0, "n", sys.executable, str(project))
    spec = AttemptSpec("run", 1, nonce, "ring", 1, [own], command=["/bin/echo", "up"])
    write_atomic(files.spec, spec.to_json())
    write_atomic(files.start, start_script(spec, files, stage_bundle(tmp_path / "bundle")))
    environment = {**os.environ, NONCE_ENV: nonce, "MLX_RANK": "0"}
    subprocess.run(["/bin/sh", str(files.start)], cwd=project, env=environment, timeout=60, check=True)
    wait_until(lambda: read_exit(files.exit(0)) is not None)
    assert files.log(0).read_bytes() == b"up\n"
    assert loaded(project) == ""
