"""What ssh and the operating system print about a host: its memory, its disk, the way to it."""

from __future__ import annotations

from typing import Final

from engine.models import Reason
from engine.runs.signatures.signature import Proof, Signature

SIGNATURES: Final[tuple[Signature, ...]] = (
    Signature(
        "memory.python",
        r"\bMemoryError\b|std::bad_alloc|[Cc]annot allocate memory|[Oo]ut of memory(?!: Killed)",
        "there was not enough memory",
        "use a smaller batch or shorter sequences, or grad_checkpoint",
        "numpy.core._exceptions._ArrayMemoryError: MemoryError: Unable to allocate 7.45 GiB",
        "Python, C++, errno(3)",
        Proof.REPRODUCED,
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "memory.killed",
        r"[Oo]ut of memory: Killed process|oom-kill",
        "the operating system killed the rank for want of memory",
        "use a smaller batch or shorter sequences, grad_checkpoint, or end other programs on that node",
        "Out of memory: Killed process 4711 (python3) total-vm:68719476kB",
        "Linux",
        Proof.SOURCE,
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "disk.full",
        r"No space left on device|Errno 28\b|Disk quota exceeded",
        "the disk was full",
        "make room where the checkpoints and logs lie, then launch again",
        "OSError: [Errno 28] No space left on device: 'adapters/0000100_adapters.safetensors'",
        "errno(3)",
        Proof.REPRODUCED,
        reason=Reason.DISK_FULL,
    ),
    Signature(
        "disk.read_only",
        r"Read-only file system",
        "the file system cannot be written to",
        "write to another place, or mount it writable",
        "OSError: [Errno 30] Read-only file system: '/Volumes/models/adapters'",
        "errno(3)",
        Proof.ASSUMED,
    ),
    Signature(
        "ssh.refused",
        r"ssh: connect to host (?P<host>\S{1,255}) port (?P<port>\d{1,5}): (?P<why>.{1,120})",
        "{host} does not take ssh on port {port}: {why}",
        "switch Remote Login on there, or correct the node's `ssh` address",
        "ssh: connect to host mini-3.local port 22: Operation timed out",
        "ssh; mlx.launch hides it by LogLevel=QUIET",
        Proof.SOURCE,
    ),
    Signature(
        "ssh.denied",
        r"Permission denied \((?:publickey|password|keyboard-interactive)",
        "the node refused our ssh key",
        "add this machine's key to the node's authorized_keys",
        "trainer@mini-3: Permission denied (publickey,password,keyboard-interactive).",
        "ssh",
        Proof.REPRODUCED,
    ),
    Signature(
        "ssh.host_key",
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the node's host key is not the known one",
        "find out why before you trust it",
        "Host key verification failed.",
        "ssh",
        Proof.REPRODUCED,
    ),
)
