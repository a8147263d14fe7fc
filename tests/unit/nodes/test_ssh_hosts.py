"""What ~/.ssh/config names is found, and nothing of it is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.nodes.ssh_hosts import SshHost, ssh_hosts
from engine.security.hosts import SshTarget


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
