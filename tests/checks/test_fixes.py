"""Fixes can be pasted as they are: what a shell and ssh make of them is the command on that node."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checks.fixes import as_shell_line, copies, copy_folder, on_path
from engine.cluster.probe_results import CheckpointStorage
from engine.config.models import Config, NodeConfig

SSH = '#!/bin/sh\nprintf "%s\\n" "$1" >>"$0.hosts"\nexec /bin/sh -c "$2"\n'
"""As ssh does: the arguments after the host are one line for a shell."""
SHELL = '#!/bin/sh\n[ "$1" = -lc ] && exec /bin/sh -c "$2"\n'
"""A login shell whose profile leaves PATH as it is."""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ssh` whose hosts are this machine; where it notes them."""
    for name, text in (("ssh", SSH), ("shell", SHELL), ("uv", '#!/bin/sh\nprintf "$@"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SHELL", str(tmp_path / "shell"))
    return tmp_path / "ssh.hosts"


def node(name: str, ssh: str) -> NodeConfig:
    return NodeConfig(name=name, ssh=ssh, python="~/venv/bin/python", workdir="~")


def on(config: Config, *hosts: str) -> Config:
    nodes = tuple(node(f"node{rank}", host) for rank, host in enumerate(hosts))
    return config.model_copy(update={"nodes": nodes})


def run(line: str) -> str:
    return subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True).stdout


def test_a_fix_goes_to_its_node_and_this_machines_needs_no_ssh(config: Config, ssh: Path) -> None:
    both = on(config, "127.0.0.1", "ada@mac:2222")
    line = as_shell_line(both, {"node0": "printf here", "node1": "printf ' there'"})
    assert line == "printf here && ssh ssh://ada@mac:2222 'printf '\"'\"' there'\"'\"''"
    assert (run(line), ssh.read_text()) == ("here there", "ssh://ada@mac:2222\n")


def test_ranks_of_one_host_are_fixed_once(config: Config) -> None:
    assert as_shell_line(on(config, "mac", "mac"), {"node0": "kill 7", "node1": "kill 7"}) == "ssh mac 'kill 7'"


def test_no_fixes_are_no_command(config: Config) -> None:
    assert as_shell_line(config, {}) is None


@pytest.mark.parametrize(
    "command", ["sudo pmset", "true || sudo pmset", "echo balanced | sudo tee a", "true;sudo pmset"]
)
def test_a_fix_that_may_ask_for_a_password_gets_a_terminal(config: Config, command: str) -> None:
    line = as_shell_line(on(config, "mac"), {"node0": command})
    assert line == f"ssh -t mac {shlex.quote(command)}"


@pytest.mark.parametrize("path", ["sudo ", "sudo", "; sudo ", "it's; sudo 'a'"])
def test_a_path_that_says_sudo_gets_none(config: Config, path: str) -> None:
    line = as_shell_line(on(config, "mac"), {"node0": (command := f"mkdir -p {shlex.quote(path)}")})
    assert line == f"ssh mac {shlex.quote(command)}"


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@pytest.mark.parametrize("program", ["printf", "uv"])
def test_whatever_a_path_holds_arrives_as_it_was(config: Config, ssh: Path, text: str, program: str) -> None:
    line = as_shell_line(on(config, "mac"), {"node0": f"{program} %s {shlex.quote(text)}"})
    assert line is not None
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=True)
    assert done.stdout == text.encode()


@pytest.mark.parametrize("hosts", [("127.0.0.1", "mac"), ("mac", "127.0.0.1"), ("a@one", "two:22")])
def test_a_copy_goes_through_this_machine_and_overwrites_nothing(
    ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, str]
) -> None:
    home, links = tmp_path / "Ana B", tmp_path / "blobs"
    for folder in (home / "s", home / "d", links):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    (links / "shard").write_text("theirs")
    (home / "s" / "model.safetensors").symlink_to(links / "shard")
    for name in ("README.md", ".hidden"):
        (home / "s" / name).write_text("theirs")
    (home / "d" / "README.md").write_text("mine")
    one, other = (node(name, host) for name, host in zip(("one", "other"), hosts, strict=True))
    fix = copies([copy_folder(one, [other], {"one": "~/s", "other": "~/d"})])
    assert fix is not None and "overwrites none" in fix.effect
    run(fix.command)
    found = {file.name: (file.read_text(), file.is_symlink()) for file in (home / "d").iterdir()}
    assert found == {"README.md": ("mine", False), "model.safetensors": ("theirs", False)}
    remote = [f"ssh://{host}" if ":" in host else host for host in hosts if host != "127.0.0.1"]
    assert sorted(ssh.read_text().split()) == sorted(remote)


def test_the_source_itself_needs_no_copy_and_a_host_only_one() -> None:
    one, twin, other, its_twin = node("one", "a"), node("twin", "a"), node("other", "b"), node("its_twin", "b")
    folders = dict.fromkeys(("one", "twin", "other", "its_twin"), "/data")
    line = copy_folder(one, [twin, other, its_twin], folders)
    assert line is not None and (line.count("ssh a "), line.count("ssh b ")) == (1, 1)
    assert copy_folder(one, [twin], folders) is None


@pytest.mark.parametrize(
    ("path", "fix"),
    [("/a b", "mkdir -p '/a b'"), ("~/x", 'mkdir -p "$HOME"/x'), (r"/a\x", r"mkdir -p '/a\x'"), ("/a\udcff", None)],
)
def test_a_path_that_is_not_utf_8_has_no_fix_for_another_path(path: str, fix: str | None) -> None:
    storage = CheckpointStorage(
        directory="/", fault="it is not there", make=path, not_durable=None, damaged=[], resume=None, resume_fault=None
    )
    assert on_path("mkdir -p", storage.make) == fix
    assert on_path("mkdir -p", None) is None
