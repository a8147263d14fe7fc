"""Files on a node: read from an offset, put whole or not at all, private, also while others look."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path, PurePosixPath

import pytest

from engine.cluster.transport.base import Transport
from engine.cluster.transport.local import LocalTransport
from engine.errors import NodeUnreachable
from tests.ssh.bench import Bench, Sshd

CONTENT = os.urandom(700_000)
SFTP_SERVERS = [Path("/usr/lib/openssh/sftp-server"), Path("/usr/libexec/sftp-server")]


@pytest.fixture
def sshd(bench: Bench) -> Sshd:
    return bench.sshd()


@pytest.fixture(params=["ssh", "local"])
def transport(request: pytest.FixtureRequest, bench: Bench, sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Transport:
    """Both ways, on the same home."""
    if request.param == "ssh":
        return bench.to(sshd)
    monkeypatch.setenv("HOME", str(sshd.home))
    return LocalTransport()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_file_is_read_from_any_offset(transport: Transport, sshd: Sshd) -> None:
    path = PurePosixPath("~/a file")
    (sshd.home / "a file").write_bytes(CONTENT)
    assert await transport.read_from(path, 0, 100_000) == CONTENT[:100_000]
    assert await transport.read_from(path, 5, 7) == CONTENT[5:12]
    assert await transport.read_from(path, len(CONTENT) - 2, 100) == CONTENT[-2:]
    assert await transport.read_from(path, len(CONTENT), 100) == b""


async def test_what_cannot_be_read_is_an_oserror(transport: Transport, sshd: Sshd) -> None:
    (sshd.home / "folder").mkdir()
    with pytest.raises(FileNotFoundError):
        await transport.read_from(PurePosixPath("~/none"), 0, 10)
    with pytest.raises(OSError):
        await transport.read_from(PurePosixPath("~/folder"), 0, 10)


async def test_a_tree_is_there_with_all_its_files_or_not_at_all(transport: Transport, sshd: Sshd) -> None:
    files = {f"engine/worker/f{n}.py": b"%d" % n for n in range(60)} | {"start.sh": CONTENT}
    await transport.put_tree(PurePosixPath("~/.flightdeck/bundles/abc"), files)
    root = sshd.home / ".flightdeck" / "bundles" / "abc"
    assert {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()} == files
    folders = [root, root.parent, root.parent.parent, root / "engine", root / "engine" / "worker"]
    assert {mode(folder) for folder in folders} == {0o700}
    assert mode(root / "start.sh") == 0o600
    with pytest.raises(OSError, match="there already"):
        await transport.put_tree(PurePosixPath("~/.flightdeck/bundles/abc"), {"other": b""})
    assert sorted(file.name for file in root.parent.iterdir()) == ["abc"]
    assert not (root / "other").exists()


async def test_of_two_who_put_the_same_tree_one_does(transport: Transport, sshd: Sshd) -> None:
    tree = PurePosixPath("~/bundle")
    both = await asyncio.gather(
        *(transport.put_tree(tree, {"a": b"%d" % n, "b": b"%d" % n}) for n in range(2)), return_exceptions=True
    )
    assert [type(one) for one in both if one is not None] == [FileExistsError]
    assert (sshd.home / "bundle/a").read_bytes() == (sshd.home / "bundle/b").read_bytes()
    assert sorted(file.name for file in sshd.home.iterdir()) == [".bashrc", "bundle"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "", "a\0b"])
async def test_a_tree_has_no_files_elsewhere(transport: Transport, sshd: Sshd, name: str) -> None:
    with pytest.raises(OSError, match="no name of a file"):
        await transport.put_tree(PurePosixPath("~/bundle"), {"good": b"", name: b""})
    assert sorted(file.name for file in sshd.home.iterdir()) == [".bashrc"]
    assert not (sshd.home.parent / "evil").exists()


async def test_a_tree_of_which_a_file_fails_is_not_there(bench: Bench, sshd: Sshd) -> None:
    transport = bench.to(sshd)
    with pytest.raises(OSError):
        await transport.put_tree(PurePosixPath("~/bundle"), {"a": b"", "a/b": b"", "c": CONTENT})
    assert sorted(file.name for file in sshd.home.iterdir()) == [".bashrc"]


async def test_a_cancelled_tree_is_not_there(bench: Bench, sshd: Sshd) -> None:
    transport = bench.to(sshd)
    await transport.round_trip_s()
    putting = asyncio.create_task(transport.put_tree(PurePosixPath("~/bundle"), {"a": CONTENT * 20}))
    await asyncio.sleep(0.02)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert sorted(file.name for file in sshd.home.iterdir()) == [".bashrc"]
    assert (await transport.run(["true"], timeout_s=10)).code == 0


async def test_an_exchange_takes_a_measurable_time_over_ssh_and_none_here(bench: Bench, sshd: Sshd) -> None:
    seconds = await bench.to(sshd).round_trip_s()
    assert seconds is not None
    assert 0 < seconds < 1
    assert await LocalTransport().round_trip_s() is None


@pytest.mark.parametrize("subsystem", ["other /bin/false", "sftp /bin/false"])
async def test_an_sshd_without_sftp_says_so_and_runs_commands(bench: Bench, subsystem: str) -> None:
    transport = bench.to(bench.sshd(Subsystem=subsystem))
    with pytest.raises(NodeUnreachable, match="no files can be sent") as raised:
        await transport.read_from(PurePosixPath("~/x"), 0, 1)
    assert "Subsystem sftp internal-sftp" in raised.value.todo
    assert (await transport.run(["true"], timeout_s=10)).code == 0


async def test_a_login_shell_that_talks_into_the_files_is_named(bench: Bench) -> None:
    """A Mac's sshd has the login shell start its sftp-server."""
    server = next(path for path in SFTP_SERVERS if path.exists())
    sshd = bench.sshd(Subsystem=f"sftp {server}")
    (sshd.home / "x").write_bytes(b"x")
    assert await bench.to(sshd).read_from(PurePosixPath("~/x"), 0, 1) == b"x"
    (sshd.home / ".bashrc").write_text("echo 'Welcome to this Mac'\n")
    with pytest.raises(NodeUnreachable, match="no files can be sent") as raised:
        await bench.to(sshd).read_from(PurePosixPath("~/x"), 0, 1)
    assert "start-up file" in raised.value.todo
