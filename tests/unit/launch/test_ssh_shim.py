"""The ssh that mlx.launch finds: what it makes of the launcher's calls, with a stand-in for the real ssh behind it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.errors import LaunchError
from engine.launch.ssh_shim import program, ssh_log_path, write_shim

# The stand-in: says how it was called, and runs the command as a node's login shell would.
REAL = """#!/bin/sh
for word in "$@"; do command=$word; printf '%s\\n' "$word" >> "$FAKE_SSH_CALLS"; done
[ -n "$FAKE_SSH_FAILS" ] && { echo "ssh: no route to host" >&2; exit 255; }
exec "${FAKE_LOGIN_SHELL:-/bin/sh}" -c "$command"
"""


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shim's path, in a folder with a name that asks for quoting."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "ssh").write_text(REAL)
    (tmp_path / "real" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'real'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FLIGHTDECK_NODE_ROOT", str(tmp_path / "node"))
    monkeypatch.delenv("TMPDIR", raising=False)
    directory = tmp_path / "an attempt's $folder"
    directory.mkdir()
    return write_shim(directory, directory / "ssh_config", "run-1", 3) / "ssh"


def call_of(shim: Path, command: str, rank: int = 2) -> list[str]:
    """As mlx.launch calls it for a rank."""
    options = ["-tt", "-o", "LogLevel=QUIET"]
    return [str(shim), *options, "ssh://ana@h:2222", f"stty -echo; export MLX_RANK={rank}; {command}"]


def call(shim: Path, command: str, rank: int = 2) -> subprocess.CompletedProcess[str]:
    argv = call_of(shim, command, rank)
    return subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def test_nothing_holds_the_launchers_pipe_while_the_rank_runs(shim: Path) -> None:
    """mlx.launch keeps a core busy for as long as it can write to one; a newline tells it that it cannot."""
    argv = call_of(shim, "echo up; exec sleep 60")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        try:
            assert rank.stdout.readline() == b"up\n"
            with pytest.raises(BrokenPipeError):
                os.write(rank.stdin.fileno(), b"\n")
        finally:
            rank.terminate()


def test_the_real_ssh_gets_our_settings_and_no_terminal(shim: Path, tmp_path: Path) -> None:
    assert call(shim, "echo hello").stdout == "hello\n"
    config = shim.parent.parent / "ssh_config"
    argv = (tmp_path / "calls").read_text().splitlines()
    settings = ["-o", "LogLevel=ERROR", "-o", "RemoteCommand=none", "-F", str(config)]
    assert argv[:10] == ["-n", "-T", *settings, "--", "ssh://ana@h:2222"]


def test_the_temporary_files_of_mlx_launch_go_below_the_attempt(shim: Path, tmp_path: Path) -> None:
    done = call(shim, 'echo "$TMPDIR [$FLIGHTDECK_TMPDIR]"; file=$(mktemp); echo "$file"')
    temporary = tmp_path / "node/runs/run-1/attempts/3/tmp"
    output, file = done.stdout.splitlines()
    assert output == f"{temporary} []"
    assert Path(file).parent == temporary


def test_they_are_written_where_a_home_has_a_blank(shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLIGHTDECK_NODE_ROOT", str(tmp_path / "Ana B [*]"))
    done = call(shim, 'file=$(mktemp); echo "[[]]" >$file; cmd=(cat "$file"); exec "${cmd[@]}"')
    assert (done.returncode, done.stdout, done.stderr) == (0, "[[]]\n", "")


def test_a_node_on_which_they_cannot_be_made_runs_nothing(shim: Path, tmp_path: Path) -> None:
    (tmp_path / "node").write_text("a file in the way")
    done = call(shim, "echo hello")
    assert (done.returncode, done.stdout.strip()) == (125, "")


def test_a_kill_of_the_launcher_is_answered_and_goes_nowhere(shim: Path, tmp_path: Path) -> None:
    done = subprocess.run([shim, "h", "kill 1; echo 1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert not (tmp_path / "calls").exists()


def test_why_ssh_failed_is_kept_for_its_rank_and_printed(shim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SSH_FAILS", "yes")
    done = call(shim, "echo hello", rank=11)
    # The launcher takes the first line for the name of a file.
    assert (done.returncode, done.stdout, done.stderr) == (255, "\n", "ssh: no route to host\n")
    assert ssh_log_path(shim.parent.parent, 11).read_text() == "ssh: no route to host\n"


SHELLS = ["sh", "bash", *(pytest.param(shell, marks=pytest.mark.needs(shell)) for shell in ("zsh", "fish"))]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_arrives_whole_in_a_bash_whatever_the_login_shell_is(
    shell: str, shim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LOGIN_SHELL", shutil.which(shell) or shell)

    @settings(max_examples=25, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @example("\\")
    @example("\\'\\\\")
    @given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=30))
    def arrives(text: str) -> None:
        done = call(shim, f'words=({shlex.quote(text)}); printf %s. "${{words[0]}}"')
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{text}.", "")

    arrives()


@pytest.mark.usefixtures("shim")
def test_a_folder_that_path_cannot_hold_and_a_missing_ssh_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a:b").mkdir()
    with pytest.raises(LaunchError, match="ends it on PATH"):
        write_shim(tmp_path / "a:b", tmp_path / "c", "r", 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no ssh"):
        write_shim(tmp_path, tmp_path / "c", "r", 1)


def test_the_program_is_the_same_for_every_home() -> None:
    assert program("run-1", 3) == [
        *("/bin/sh", "-c"),
        'exec /bin/sh "${FLIGHTDECK_NODE_ROOT:-$HOME/.flightdeck}"/runs/run-1/attempts/3/start.sh',
    ]
