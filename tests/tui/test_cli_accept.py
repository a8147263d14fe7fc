"""A folder may be somebody else's: what its configuration makes run is named and accepted before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tui.commands import ACCEPTING, flightdeck

PYTHON = '[[node]]\nname = "a"\npython = "{python}"\n[job]\nmodel = "model"\ndata = "data"\n'
HERE = '[[node]]\nname = "a"\n[job]\nmodel = "model"\ndata = "data"\n'


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Is there as soon as a program of the folder has run."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path: Path, marker: Path) -> Path:
    """With programs that leave the marker."""
    (folder := tmp_path / "theirs").mkdir()
    for name in ("python", "sync.sh", "train.sh"):
        (folder / name).write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
        (folder / name).chmod(0o755)
    return folder


def write(folder: Path, text: str) -> None:
    (folder / "flightdeck.toml").write_text(text.format(python=folder / "python"))


@pytest.mark.parametrize("command", sorted(ACCEPTING))
def test_without_a_terminal_its_python_is_named_and_not_run(
    home: Path, folder: Path, marker: Path, command: str
) -> None:
    write(folder, PYTHON)
    done = flightdeck(home, command, cwd=folder, accept=False)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"flightdeck: {folder}/flightdeck.toml makes programs run that nobody has accepted: this machine: "
        f"{folder}/python (look at them, then add --accept)\n"
    )
    assert not marker.exists()


def test_what_was_accepted_is_not_asked_again_until_it_changes(home: Path, folder: Path, marker: Path) -> None:
    write(folder, PYTHON)
    assert flightdeck(home, "nodes", "--accept", cwd=folder, accept=False).code == 1
    assert marker.exists()
    write(folder, PYTHON + "batch_size = 4\n")
    for command in ("nodes", "plan", "preflight"):
        assert "accepted" not in flightdeck(home, command, cwd=folder, accept=False).err
    (folder / "python").rename(folder / "python3")
    write(folder, PYTHON.replace("{python}", "{python}3"))
    marker.unlink()
    for command in ("nodes", "plan", "preflight"):
        assert flightdeck(home, command, cwd=folder, accept=False).code == 2
    assert not marker.exists()


def named(folder: Path, key: str) -> str:
    texts = {
        "sync_script": f'[preflight]\nsync_script = "{folder}/sync.sh"\n',
        "trust_remote_code": "trust_remote_code = true\n",
        "config": 'config = "lora.yaml"\n',
        "env": 'env = { LD_PRELOAD = "./evil.so", NCCL_DEBUG = "INFO" }\n',
    }
    (folder / "lora.yaml").write_text("trust_remote_code: true\n")
    return texts[key]


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("sync_script", "sync_script: {folder}/sync.sh"),
        ("trust_remote_code", "the model's own code: {folder}/model (trust_remote_code)"),
        ("config", "the model's own code: {folder}/model (trust_remote_code)"),
        ("env", "with the variables: LD_PRELOAD ("),
    ],
)
def test_whatever_a_check_would_run_is_named(home: Path, folder: Path, key: str, shown: str) -> None:
    (folder / "flightdeck.toml").write_text(HERE + named(folder, key))
    done = flightdeck(home, "preflight", cwd=folder, accept=False)
    assert done.code == 2 and shown.format(folder=folder) in done.err, done.err


def edit_script(folder: Path) -> None:
    (folder / "sync.sh").write_text("#!/bin/sh\n")


def edit_own_code(folder: Path) -> None:
    (folder / "model" / "tokenization_own.py").write_text("import os\n")


def edit_yaml(folder: Path) -> None:
    (folder / "lora.yaml").write_text("trust_remote_code: true\nmodel: other\n")


@pytest.mark.parametrize(
    ("key", "edit"),
    [("sync_script", edit_script), ("trust_remote_code", edit_own_code), ("config", edit_yaml)],
)
def test_other_content_of_what_it_names_is_asked_for_again(
    home: Path, folder: Path, key: str, edit: Callable[[Path], None]
) -> None:
    (folder / "model").mkdir()
    text = HERE.replace('model = "model"\n', "") if key == "config" else HERE
    (folder / "flightdeck.toml").write_text(text + named(folder, key))
    (folder / "lora.yaml").write_text("trust_remote_code: true\nmodel: model\n")
    assert flightdeck(home, "plan", "--accept", cwd=folder, accept=False).code != 2
    assert flightdeck(home, "plan", cwd=folder, accept=False).code != 2
    edit(folder)
    done = flightdeck(home, "plan", cwd=folder, accept=False)
    assert (done.code, "nobody has accepted" in done.err) == (2, True)


def test_a_command_is_named_before_its_launch_and_needs_nothing_to_be_planned(
    home: Path, folder: Path, marker: Path
) -> None:
    (folder / "flightdeck.toml").write_text('[[node]]\nname = "a"\n[job]\ncommand = ["./train.sh", "--lr", "1"]\n')
    assert flightdeck(home, "plan", cwd=folder, accept=False).err == ""
    done = flightdeck(home, "launch", cwd=folder, accept=False)
    assert (done.code, "the command: ./train.sh --lr 1 (look" in done.err) == (2, True)
    assert not marker.exists() and not (home / "runs").exists()


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_a_person_is_asked_and_only_yes_is_yes(
    home: Path, folder: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    write(folder, PYTHON)
    monkeypatch.setattr("tui.commands.terminal.is_person", lambda stream: True)
    monkeypatch.setattr("builtins.input", lambda: answer)
    done = flightdeck(home, "nodes", "--json", cwd=folder, accept=False)
    assert (done.code, marker.exists()) == ((1, True) if answer == "y" else (2, False))
    question = "run them (asked again only when other things would run)? [y/N] "
    assert f"  this machine  {folder}/python\n{question}" in done.err


def test_this_machine_with_nothing_of_its_own_needs_nothing(home: Path, folder: Path) -> None:
    (folder / "flightdeck.toml").write_text(HERE + 'env = { NCCL_DEBUG = "INFO" }\n')
    assert "accepted" not in flightdeck(home, "plan", cwd=folder, accept=False).err
