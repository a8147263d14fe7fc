"""Our own known_hosts: one line for each accepted key, from whatever process, and nothing else ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.transport.known_hosts import add_known_host

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
    said = (home / "known_hosts").read_text()
    assert said == f"{name} {key}\n"
    assert said.isascii()
    assert len(said.split()) == 3
