"""Arguments become a line for a shell in one place, and every one arrives as it was."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster.transport.base import for_any_shell, quoted
from engine.errors import InputError
from engine.security.identifiers import SshTarget

ARGUMENTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["-oProxyCommand=id", "a;id", "$(id)", "`id`", "../..", "\n", "a'\"b", "\\", "!!", "-n", "", "*", "%s%n", "\udcff"]
)
SHELLS = [
    "sh",
    "bash",
    *(pytest.param(shell, marks=pytest.mark.needs(shell)) for shell in ("dash", "zsh", "fish", "tcsh")),
]
"""As login shells may be."""


def seen_by(line: str, shell: str) -> list[str]:
    """The arguments that a program gets when `shell` runs `line`."""
    done = subprocess.run([shell, "-c", line], capture_output=True, check=True, env={"PATH": os.environ["PATH"]})
    return os.fsdecode(done.stdout).split("\0")[:-1]


def unexpanded(argument: str) -> bool:
    return argument != "~" and not argument.startswith("~/")


@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=40)
@given(arguments=st.lists(ARGUMENTS.filter(unexpanded), max_size=6))
def test_a_script_passes_any_login_shell_unread(shell: str, arguments: list[str]) -> None:
    script = f"set -- {' '.join(map(quoted, arguments))}\nprintf '%s\\0' first \"$@\""
    line = for_any_shell(script)
    assert line.isascii()
    assert line.isprintable()
    assert seen_by(line, shell) == ["first", *arguments]


def test_only_a_path_in_the_home_is_expanded() -> None:
    assert quoted("~") == '"$HOME"'
    assert quoted("~/a b") == "\"$HOME\"/'a b'"
    for other in ("~bob/x", "a~", "$HOME/x", "/~/x"):
        assert 'HOME"' not in quoted(other)


def test_a_nul_is_refused() -> None:
    with pytest.raises(InputError):
        quoted("a\0b")


@given(st.text(max_size=80) | st.from_regex(r"[-a-z@:.\[\]0-9$;\n ]{1,30}", fullmatch=True))
def test_what_is_taken_for_a_host_can_harm_no_command_line(text: str) -> None:
    try:
        target = SshTarget.parse(text)
    except InputError as refused:
        assert "\n" not in str(refused)
        return
    for output in (str(target), target.openssh.removeprefix("ssh://"), target.host, target.user or "x"):
        assert output.isascii()
        assert not output.startswith("-")
        assert not set(output) & set(" \t\n;&|<>$`'\"\\(){}*?!#~%,=/")
    assert target.port is None or 1 <= target.port <= 65535
    assert SshTarget.parse(str(target)) == target


@pytest.mark.parametrize("text", ["a@[::1]:22", "[fe80::1]", "ana.local", "me@10.0.0.2:2222", "node_1"])
def test_hosts_as_people_write_them_are_taken(text: str) -> None:
    assert str(SshTarget.parse(text)) == text
