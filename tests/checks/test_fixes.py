"""Fixes can be pasted as they are: what a shell and ssh make of them is the command on that node."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checks.fixes import Fix, as_shell_line, copies, copy_folder, copy_tree, move_aside, on_path
from engine.cluster.probe_results import CheckpointStorage
from engine.config.models import Config, NodeConfig

SSH = '#!/bin/sh\nprintf "%s\\n" "$1" >>"$0.hosts"\nexec ${LOGIN_SHELL:-/bin/sh} -c "$2"\n'
"""As ssh does: the arguments after the host are one line for a shell."""
TARS = ["tar", pytest.param("bsdtar", marks=pytest.mark.needs("bsdtar"))]
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


@pytest.fixture
def folders(ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with `s` and `d`, to be copied from and to."""
    home, links = tmp_path / "Ana B", tmp_path / "blobs"
    for folder in (home / "s" / "more", home / "d", links):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    (links / "shard").write_text("theirs")
    (home / "s" / "model.safetensors").symlink_to(links / "shard")
    for name in ("README.md", ".hidden", "more/merges.txt"):
        (home / "s" / name).write_text("theirs")
    (home / "d" / "README.md").write_text("mine")
    return home


def use_tar(program: str, ssh: Path) -> None:
    found = shutil.which(program)
    assert found is not None
    (ssh.parent / "tar").symlink_to(found)


def copied(*hosts: str, aside: bool = False) -> Fix:
    one, other = (node(name, host) for name, host in zip(("one", "other"), hosts, strict=True))
    moved = move_aside(other, "~/d/README.md", "ab12") if aside else None
    fix = copies([moved, copy_folder(one, [other], {"one": "~/s", "other": "~/d"})], one, "~/s")
    assert fix is not None
    return fix


def files_below(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("tar", TARS)
@pytest.mark.parametrize("hosts", [("127.0.0.1", "mac"), ("mac", "127.0.0.1"), ("a@one", "two:22")])
def test_a_copy_goes_through_this_machine_and_overwrites_nothing(
    ssh: Path, folders: Path, hosts: tuple[str, str], tar: str
) -> None:
    use_tar(tar, ssh)
    fix = copied(*hosts)
    assert "overwrites none" in fix.effect
    run(fix.command)
    assert files_below(folders / "d") == {
        "README.md": "mine", "model.safetensors": "theirs", "more/merges.txt": "theirs"
    }  # fmt: skip
    assert not (folders / "d" / "model.safetensors").is_symlink()
    remote = {f"ssh://{host}" if ":" in host else host for host in hosts if host != "127.0.0.1"}
    assert set(ssh.read_text().split()) == remote


@pytest.mark.parametrize("tar", TARS)
def test_a_tree_is_copied_without_a_path_but_with_others_of_its_name(ssh: Path, folders: Path, tar: str) -> None:
    use_tar(tar, ssh)
    for name in ("data/x", "more/data/y", "more/__pycache__/z", "a b/data"):
        (folders / "s" / name).parent.mkdir(exist_ok=True)
        (folders / "s" / name).write_text("theirs")
    one, other = node("one", "a"), node("other", "b")
    paths = {"one": "~/s", "other": "~/d"}
    line = copy_tree(one, [other], paths, exclude_names=["__pycache__"], exclude_paths=["data", "a b"])
    run(line or "false")
    assert files_below(folders / "d").keys() == {
        ".hidden", "README.md", "model.safetensors", "more/data/y", "more/merges.txt"
    }  # fmt: skip
    (archive,) = (folders / ".flightdeck" / "replaced").glob("d-*.tar.gz")
    subprocess.run(["tar", "-C", str(folders / "d"), "-xzf", str(archive)], check=True)
    assert files_below(folders / "d")["README.md"] == "mine", "what was replaced can be brought back"


@pytest.mark.parametrize("tar", TARS)
def test_a_copy_from_a_folder_that_is_gone_fails_before_anything_is_moved(ssh: Path, folders: Path, tar: str) -> None:
    use_tar(tar, ssh)
    (folders / "s").rename(folders / "away")
    ended = subprocess.run(["/bin/sh", "-c", copied("a", "b", aside=True).command], check=False, capture_output=True)
    assert (ended.returncode != 0, files_below(folders / "d")) == (True, {"README.md": "mine"})


@pytest.mark.parametrize("tar", TARS)
def test_a_copy_fails_where_its_source_packs_nothing(ssh: Path, folders: Path, tar: str) -> None:
    use_tar(tar, ssh)
    (ssh.parent / "env").write_text("#!/bin/sh\nexit 2\n")
    (ssh.parent / "env").chmod(0o755)
    ended = subprocess.run(["/bin/sh", "-c", copied("a", "b").command], check=False, capture_output=True)
    assert ended.returncode != 0, "the program that packs has not even begun"


@pytest.mark.parametrize("shell", [pytest.param(shell, marks=pytest.mark.needs(shell)) for shell in ("fish", "tcsh")])
@pytest.mark.parametrize("hosts", [("127.0.0.1", "mac"), ("mac", "127.0.0.1")])
def test_a_copy_passes_a_login_shell_that_is_no_posix_shell(
    ssh: Path, folders: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, str], shell: str
) -> None:
    monkeypatch.setenv("LOGIN_SHELL", shell)
    subprocess.run([shell, "-c", copied(*hosts, aside=True).command], check=True)
    assert files_below(folders / "d").keys() == {
        "README.md", "README.md.aside-ab12", "model.safetensors", "more/merges.txt"
    }  # fmt: skip


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
