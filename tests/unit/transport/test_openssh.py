"""The configuration for OpenSSH's own ssh, as ssh itself reads it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.security.hosts import SshTarget
from engine.transport.openssh import openssh_config, shell_argv, write_openssh_config

THEIRS = """
Host ana
    HostName 10.0.0.1
    User ada
    Port 2200
    IdentityFile ~/.ssh/lab
    RemoteCommand tmux attach
    LocalForward 8080 localhost:80
    ControlMaster auto
    ControlPath ~/.ssh/%C
    UserKnownHostsFile = "/lab/known hosts" ~/.ssh/lab_hosts
    ServerAliveInterval 600
    StrictHostKeyChecking no
    ForwardAgent yes
Host *
    ConnectTimeout 99
"""


@pytest.fixture(params=["plain", "with spaces [a-z] #1 100%"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / str(request.param)
    folder.mkdir()
    (folder / "their config").write_text(THEIRS)
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(folder / "their config"))
    return folder


def as_ssh_reads(config: Path, host: str) -> dict[str, str]:
    done = subprocess.run(["ssh", "-G", "-F", str(config), "--", host], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_ours_comes_first_then_the_users(folder: Path) -> None:
    write_openssh_config(folder / "ssh_config", folder)
    read = as_ssh_reads(folder / "ssh_config", "ana")
    assert (read["hostname"], read["user"], read["port"], read["identityfile"]) == (
        "10.0.0.1",
        "ada",
        "2200",
        "~/.ssh/lab",
    )
    assert (read["connecttimeout"], read["serveraliveinterval"], read["serveralivecountmax"]) == ("10", "5", "3")
    assert (read["batchmode"], read["stricthostkeychecking"], read["forwardagent"]) == ("yes", "true", "no")
    assert (read["clearallforwardings"], read["controlmaster"]) == ("yes", "false")
    assert "remotecommand" not in read
    assert "controlpath" not in read
    for name in (f"{folder}/known_hosts", "/lab/known hosts", ".ssh/lab_hosts", ".ssh/known_hosts"):
        assert name in read["userknownhostsfile"]
    assert (folder / "ssh_config").stat().st_mode & 0o777 == 0o600


def test_a_person_may_be_asked_and_keeps_what_is_set_for_people(folder: Path) -> None:
    write_openssh_config(folder / "ssh_config", folder, unattended=False)
    read = as_ssh_reads(folder / "ssh_config", "ana")
    assert (read["batchmode"], read["stricthostkeychecking"]) == ("no", "true")
    assert read["remotecommand"] == "tmux attach"


def test_a_configuration_that_is_not_there_is_none(folder: Path) -> None:
    (folder / "their config").unlink()
    write_openssh_config(folder / "ssh_config", folder)
    assert as_ssh_reads(folder / "ssh_config", "ana")["hostname"] == "ana"


@pytest.mark.parametrize("name", ['a"b', "a\nBatchMode no", "${HOME}"])
def test_a_path_that_no_configuration_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        openssh_config(tmp_path / name)


def test_the_argv_of_a_shell() -> None:
    config = Path("/home/me/ssh_config")
    assert shell_argv(SshTarget("ana", "ada", 22), config) == ["ssh", "-t", "-F", str(config), "--", "ssh://ada@ana:22"]
    assert shell_argv(SshTarget("127.0.0.1"), config)[-1] == "-l"
