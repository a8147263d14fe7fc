"""OpenSSH's files on the head: hosts of ~/.ssh/config are found and nothing of it is run; our known_hosts has one
line per accepted key; ssh reads the configuration that we write.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.transport import ssh_config
from engine.cluster.transport.ssh_config import (
    SshHost,
    add_known_host,
    shell_argv,
    ssh_hosts,
    write_openssh_config,
)
from engine.errors import InputError
from engine.security.identifiers import SshTarget

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDQxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMzQ1Njc4OTA="


def test_those_who_accept_at_once_lose_no_line(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_known_host(tmp_path / "home", f"node{n % 20}", KEY), range(100)))
    lines = (tmp_path / "home" / "known_hosts").read_text().splitlines()
    assert sorted(lines) == sorted(f"node{n} {KEY}" for n in range(20))


def test_a_line_cut_off_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    add_known_host(tmp_path, "ana", KEY)
    with (tmp_path / "known_hosts").open("a") as file:
        file.write("bea ssh-ed")
    add_known_host(tmp_path, "cy", KEY)
    assert (tmp_path / "known_hosts").read_text().splitlines() == [f"ana {KEY}", "bea ssh-ed", f"cy {KEY}"]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "known_hosts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        add_known_host(tmp_path, "ana", KEY)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("ana\nbea", KEY),
        ("*", KEY),
        ("@cert-authority", KEY),
        ("a,b", KEY),
        ("!a", KEY),
        ("|1|x|y", KEY),
        ("", KEY),
        ("ana", f"{KEY}\nbea {KEY}"),
        ("ana", f"{KEY} comment"),
        ("ana", "@revoked AAAA"),
        ("ana", "ssh-ed25519"),
        ("ana", "ssh-ed25519 AA AA"),
    ],
)
def test_a_hostile_name_or_key_is_refused(tmp_path: Path, name: str, key: str) -> None:
    with pytest.raises(InputError):
        add_known_host(tmp_path / "home", name, key)
    assert not (tmp_path / "home").exists()


@given(name=st.text(max_size=20), key=st.text(max_size=40))
def test_whatever_is_written_is_one_name_and_one_key(
    tmp_path_factory: pytest.TempPathFactory, name: str, key: str
) -> None:
    home = tmp_path_factory.getbasetemp() / "any"
    (home / "known_hosts").unlink(missing_ok=True)
    try:
        add_known_host(home, name, key)
    except InputError:
        return
    output = (home / "known_hosts").read_text()
    assert output == f"{name} {key}\n"
    assert output.isascii()
    assert len(output.split()) == 3


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_concrete_entries_are_hosts_and_patterns_are_not(tmp_path: Path) -> None:
    config = written(
        tmp_path / "config",
        """\
# Host commented
Host ultra
    HostName ultra.local
    User ana
    User second-is-ignored
Host max "mini" *.lab !bad ?x
  hostname=10.0.0.7
  PORT = 2222
Host *
    User everyone
HOST\ttabs
""",
    )
    assert ssh_hosts([config]) == [
        SshHost("ultra", "ultra.local", "ana"),
        SshHost("max", "10.0.0.7", None, "2222"),
        SshHost("mini", "10.0.0.7", None, "2222"),
        SshHost("tabs"),
    ]


def test_match_blocks_belong_to_no_host_and_are_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    config = written(tmp_path / "config", f'Host a\nMatch exec "touch {ran}"\n  User evil\nHost b\n  User bea\n')
    assert ssh_hosts([config]) == [SshHost("a"), SshHost("b", user="bea")]
    assert not ran.exists()


def test_includes_of_the_system_are_beside_it_and_their_known_hosts_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh_config, "_SYSTEM_CONFIG", written(tmp_path / "etc/ssh_config", "Include conf.d/*\n"))
    written(tmp_path / "etc/conf.d/one", "Host one\n  UserKnownHostsFile /etc/ours\nInclude conf.d/more/*\n")
    written(tmp_path / "etc/conf.d/more/two", "Host two\n")
    written(tmp_path / ".ssh/config", "Include mine\n")
    written(tmp_path / ".ssh/mine", "UserKnownHostsFile ~/.ssh/kept\n")
    assert ssh_hosts() == [SshHost("one"), SshHost("two")]
    write_openssh_config(tmp_path / "written", tmp_path / "home")
    (line,) = [line for line in (tmp_path / "written").read_text().splitlines() if "UserKnownHostsFile" in line]
    assert line.split()[2:4] == ["~/.ssh/kept", "/etc/ours"]


def test_include_is_followed_from_the_folder_of_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / ".ssh/conf.d/one", "Host one\n  User ana\n")
    written(tmp_path / ".ssh/conf.d/two", "  User nobody\nHost two\n")
    absolute = written(tmp_path / "elsewhere/three", "Host three\n")
    text = f"Include conf.d/*\nHost main\n  Include {absolute} ~/missing\n  User me\n"
    config = written(tmp_path / ".ssh/config", text)
    assert ssh_hosts() == ssh_hosts([config])
    assert ssh_hosts() == [
        SshHost("one", user="ana"),
        SshHost("two"),
        SshHost("main", user="me"),
        SshHost("three"),
    ]


def test_a_file_that_includes_itself_ends(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Include {config}\nHost a\n")
    assert ssh_hosts([config]) == [SshHost("a")]


def test_names_that_ssh_must_not_be_given_and_git_servers_are_left_out(tmp_path: Path) -> None:
    config = written(tmp_path / "config", "Host -oProxyCommand=id a;id $(id) x/y fine\nHost github.com\n User git\n")
    assert [host.alias for host in ssh_hosts([config])] == ["fine"]


def test_no_file_no_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ssh_hosts([tmp_path / "none", tmp_path]) == []
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(written(tmp_path / "other", "Host a\n")))
    assert ssh_hosts() == [SshHost("a")]


@given(text=st.text(alphabet=st.sampled_from("Host includ*?!-\"'=\n \t#azAZ09.@:\x00\x1b")))
def test_whatever_the_file_says_its_hosts_are_hosts(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = tmp_path_factory.getbasetemp() / "ssh-config-of-any-text"
    config.write_text(text)
    for host in ssh_hosts([config]):
        try:
            assert SshTarget.parse(host.alias)
        except InputError:
            pytest.fail(host.alias)


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


@pytest.mark.needs("ssh")
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


@pytest.mark.needs("ssh")
def test_a_person_may_be_asked_and_keeps_what_is_set_for_people(folder: Path) -> None:
    write_openssh_config(folder / "ssh_config", folder, unattended=False)
    read = as_ssh_reads(folder / "ssh_config", "ana")
    assert (read["batchmode"], read["stricthostkeychecking"]) == ("no", "true")
    assert read["remotecommand"] == "tmux attach"


@pytest.mark.needs("ssh")
def test_a_configuration_that_is_not_there_is_none(folder: Path) -> None:
    (folder / "their config").unlink()
    write_openssh_config(folder / "ssh_config", folder)
    assert as_ssh_reads(folder / "ssh_config", "ana")["hostname"] == "ana"


@pytest.mark.parametrize("name", ['a"b', "a\nBatchMode no", "${HOME}"])
def test_a_path_that_no_configuration_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        write_openssh_config(tmp_path / "ssh_config", tmp_path / name)


def test_the_argv_of_a_shell() -> None:
    config = Path("/home/me/ssh_config")
    assert shell_argv(SshTarget("ana", "ada", 22), config) == ["ssh", "-t", "-F", str(config), "--", "ssh://ada@ana:22"]
    assert shell_argv(SshTarget("127.0.0.1"), config)[-1] == "-l"
