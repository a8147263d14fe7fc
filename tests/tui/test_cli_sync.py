"""`flightdeck sync`, as a shell sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tui.commands import flightdeck

CONFIG = """
[[node]]
name = "first"
workdir = "{first}"

[[node]]
name = "second"
workdir = "{second}"

[job]
command = ["python", "train.py"]

[preflight]
sync_script = "{script}"
"""


@pytest.fixture
def project(tmp_path: Path, home: Path) -> Path:
    """Two workdirs of this machine; the second lacks a file."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "first" / "train.py").write_text("print(1)\n")
    text = CONFIG.format(first=tmp_path / "first", second=tmp_path / "second", script=tmp_path / "sync.sh")
    (tmp_path / "flightdeck.toml").write_text(text)
    return tmp_path


def test_a_dry_run_compares_and_copies_nothing(project: Path, home: Path) -> None:
    done = flightdeck(home, "sync", "--dry-run", cwd=project)
    assert done.code == 1
    assert done.out.splitlines()[0] == "fail  second: 1 missing: train.py"
    assert not (project / "second" / "train.py").exists()


@pytest.mark.needs("rsync")
def test_rsync_makes_them_alike_and_json_says_how(project: Path, home: Path) -> None:
    done = flightdeck(home, "sync", "--json", cwd=project)
    report = json.loads(done.out)
    assert (done.code, report["method"], report["synced"]) == (0, "rsync", True), done
    assert report["nodes"]["second"]["same"] is True
    assert (project / "second" / "train.py").read_text() == "print(1)\n"
    assert flightdeck(home, "sync", "--dry-run", cwd=project).code == 0


def test_a_script_of_the_users_own_is_heard_and_its_trees_are_compared(project: Path, home: Path) -> None:
    script = project / "sync.sh"
    script.write_text("#!/bin/sh\necho copying\n")
    script.chmod(0o755)
    done = flightdeck(home, "sync", cwd=project)
    assert (done.code, done.out.splitlines()) == (
        1,
        ["  copying", "fail  second: 1 missing: train.py", "fail  sync.sh: success"],
    )
    script.write_text(f"#!/bin/sh\ncp {project}/first/train.py {project}/second/\n")
    assert flightdeck(home, "sync", cwd=project).code == 0
    script.write_text("#!/bin/sh\nexit 3\n")
    assert "sync.sh ended with 3" in flightdeck(home, "sync", cwd=project).out


@pytest.mark.parametrize("script", ["../sync.sh", "$(id)", "-rf"])
def test_a_script_by_a_path_that_is_none_is_refused_before_anything(project: Path, home: Path, script: str) -> None:
    text = (project / "flightdeck.toml").read_text().replace(str(project / "sync.sh"), script)
    (project / "flightdeck.toml").write_text(text)
    done = flightdeck(home, "sync", cwd=project)
    assert (done.code, "preflight.sync_script" in done.err) == (2, True)
