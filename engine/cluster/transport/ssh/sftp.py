"""Files on a node over SFTP; errors are raised as OSError."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
from collections.abc import Coroutine, Iterator
from pathlib import PurePath
from typing import Any

import asyncssh

from engine.cluster.transport.base import check_names, in_home

_AT_ONCE = 32
_PRIVATE = asyncssh.SFTPAttrs(permissions=0o700)
SFTP_LOST = (asyncssh.SFTPNoConnection, asyncssh.SFTPConnectionLost)
"""The node's SFTP server is gone, alone or with the connection."""
_NUMBERS = {
    asyncssh.SFTPNoSuchFile: errno.ENOENT,
    asyncssh.SFTPNoSuchPath: errno.ENOENT,
    asyncssh.SFTPPermissionDenied: errno.EACCES,
    asyncssh.SFTPFileAlreadyExists: errno.EEXIST,
    asyncssh.SFTPNoSpaceOnFilesystem: errno.ENOSPC,
    asyncssh.SFTPQuotaExceeded: errno.EDQUOT,
    asyncssh.SFTPNotADirectory: errno.ENOTDIR,
    asyncssh.SFTPFileIsADirectory: errno.EISDIR,
    asyncssh.SFTPDirNotEmpty: errno.ENOTEMPTY,
}


@contextlib.contextmanager
def as_os_errors(path: PurePath, where: str) -> Iterator[None]:
    """SFTP's errors as the system's; a lost connection stays what it is."""
    try:
        yield
    except SFTP_LOST:
        raise
    except asyncssh.SFTPError as error:
        # OpenSSH says "Failure" for all that the protocol of its day has no word for, a full disk among it.
        number = _NUMBERS.get(type(error), errno.EIO)
        raise OSError(number, f"{error.reason or 'refused'} on {where}", str(path)) from error


async def read_from(sftp: asyncssh.SFTPClient, path: PurePath, offset: int, size: int) -> bytes:
    async with sftp.open(_name(path), "rb", block_size=0) as file:
        data = await file.read(size, offset)
    assert isinstance(data, bytes)
    return data


async def put_tree(sftp: asyncssh.SFTPClient, path: PurePath, files: dict[str, bytes]) -> None:
    name = _name(path)
    made = _beside(name)
    check_names(files)
    if await sftp.exists(name):
        raise FileExistsError(errno.EEXIST, "is there already", str(path))
    if parent := name.rpartition("/")[0]:
        await sftp.makedirs(parent, _PRIVATE, exist_ok=True)
    writing = asyncio.Semaphore(_AT_ONCE)

    async def write(file: str, content: bytes) -> None:
        async with writing:
            await _write(sftp, f"{made}/{file}", content)

    try:
        await sftp.mkdir(made, _PRIVATE)
        for folder in sorted({str(folder) for file in files for folder in PurePath(file).parents} - {"."}):
            await sftp.makedirs(f"{made}/{folder}", _PRIVATE, exist_ok=True)
        ended = await asyncio.gather(*(write(*file) for file in files.items()), return_exceptions=True)
        for failure in ended:
            if failure is not None:
                raise failure
        await sftp.rename(made, name)
    except BaseException as error:
        await _cleanup(sftp.rmtree(made, ignore_errors=True))
        if isinstance(error, asyncssh.SFTPFailure) and await sftp.exists(name):
            raise FileExistsError(errno.EEXIST, "is there already", str(path)) from error
        raise


async def _write(sftp: asyncssh.SFTPClient, name: str, content: bytes) -> None:
    async with sftp.open(name, "wb", asyncssh.SFTPAttrs(permissions=0o600)) as file:
        await file.write(content)
        with contextlib.suppress(asyncssh.SFTPOpUnsupported):
            await file.fsync()


def _name(path: PurePath) -> str:
    """For SFTP, which begins in the user's home."""
    inside = in_home(path)
    return str(path) if inside is None else inside or "."


def _beside(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.{secrets.token_hex(4)}"


async def _cleanup(removal: Coroutine[Any, Any, None]) -> None:
    """Also when the call is cancelled; what cannot be removed has a name that nobody uses."""
    with contextlib.suppress(asyncssh.Error, OSError):
        await asyncio.shield(asyncio.create_task(removal))
