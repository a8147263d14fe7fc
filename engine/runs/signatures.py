"""What MLX, mlx-lm, ssh and the operating system print when they fail, and what that means: data, in our own words.

`cause` and `fix` may name the expression's groups; `{errno}` is told in words. The source says where the text is from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Kind(IntEnum):
    """How much a match explains; a lower one goes before a higher."""

    CAUSE = 0
    """Explains the end by itself."""
    SYMPTOM = 1
    """What a rank says because another one, or a link, went before: told only when nothing better is known."""
    REMARK = 2
    """Said in healthy runs too, or about a rank that another log explains."""


@dataclass(frozen=True)
class Signature:
    """One text and its meaning."""

    id: str
    pattern: str
    """A regular expression."""
    cause: str
    fix: str
    source: str
    kind: Kind = Kind.CAUSE


ERRNO_WORDS: Final = {
    "2": "the other side has gone",
    "13": "permission denied",
    "22": "invalid argument",
    "48": "the port is in use",
    "98": "the port is in use",
    "49": "the address is not on this host",
    "99": "the address is not on this host",
    "54": "the connection was reset",
    "104": "the connection was reset",
    "60": "it timed out",
    "110": "it timed out",
    "61": "it was refused",
    "111": "it was refused",
    "65": "there is no route to the host",
    "113": "there is no route to the host",
}
"""Of macOS and Linux; no number means different things on the two among these."""


_RING = "mlx/distributed/ring"
_LAUNCH = "mlx/_distributed_utils/launch.py"
_JACCL = "mlx/distributed/jaccl"
_LM = "mlx_lm/tuner"

SIGNATURES: Final[tuple[Signature, ...]] = (
    Signature(
        "launch.python_missing",
        r"exec: (?P<command>\S+): (?:cannot execute: )?(?:not found|No such file)",
        "the program {command} was not found on this host",
        "name the interpreter by its absolute path on that node, `python` of its [[node]]",
        "sh",
    ),
    Signature(
        "launch.interp_missing",
        r"sh: (?:line )?\d+: (?:exec: )?(?P<path>/\S+): (?:not found|No such file or directory)",
        "{path} does not exist on this host",
        "make the environment there, or correct `python` of that [[node]]",
        "sh",
    ),
    Signature(
        "launch.py_double",
        r"SyntaxError: source code cannot contain null bytes",
        "an interpreter was run as a Python script: this mlx puts its own python in front of the program",
        "use mlx 0.32.1 or newer on every node",
        _LAUNCH,
    ),
    Signature(
        "launch.ring_needs_ip",
        r"The ring backend requires IPs to be provided instead of hostnames",
        "a node has no IP address in the hostfile",
        "give that [[node]] its `ips`",
        _LAUNCH,
    ),
    Signature(
        "launch.hostfile_rdma",
        r"The hostfile is malformed: (?P<why>.+)|Malformed hostfile for jaccl backend",
        "mlx.launch refuses the hostfile",
        "check that every pair of nodes has an RDMA device, and none with itself",
        _LAUNCH,
    ),
    Signature(
        "launch.rank_exit",
        r"\[WARN\].*Node with rank (?P<rank>\d+) exited with code (?P<code>-?\d+)",
        "rank {rank} exited with code {code}",
        "read that rank's log",
        _LAUNCH,
        Kind.REMARK,
    ),
    Signature(
        "launch.rank_killed",
        r"Node with rank (?P<rank>\d+) was killed",
        "mlx.launch killed rank {rank} because another one had failed",
        "look for the first rank that failed",
        _LAUNCH,
        Kind.REMARK,
    ),
    Signature(
        "launch.remote_kill_failed",
        r"CalledProcessError: Command 'ssh (?P<host>\S+) 'pid=\$\(cat ",
        "mlx.launch could not kill the rank on {host}, as always",
        "nothing: Flight Deck ends it itself",
        _LAUNCH,
        Kind.REMARK,
    ),
    Signature(
        "ring.bind",
        r"\[ring\] Couldn't bind socket \(error: (?P<errno>\d+)",
        "the ring could not listen on its port: {errno}",
        "end what holds the port (an earlier run's rank?), or correct the node's address",
        _RING,
    ),
    Signature(
        "ring.connect_retry",
        r"\[ring\] Attempt (?P<number>\d+) waiting (?P<ms>\d+) ms \(error: (?P<errno>\d+)",
        "the peer does not listen yet",
        "nothing, while it happens once or twice",
        _RING,
        Kind.REMARK,
    ),
    Signature(
        "ring.connect",
        r"\[ring\] Couldn't connect \(error: (?P<errno>\d+)",
        "the ring could not connect to a peer: {errno}",
        "see whether that peer's rank started; else check address, firewall and, on macOS, Local Network privacy",
        _RING,
        Kind.SYMPTOM,
    ),
    Signature(
        "ring.peer_lost_new",
        r"\[ring\] connection to a peer was lost",
        "the connection to a peer was lost",
        "look for the rank or the link that went first",
        _RING,
        Kind.SYMPTOM,
    ),
    Signature(
        "ring.peer_closed",
        r"\[ring\] Socket (?P<socket>\d+) was closed by the peer",
        "a neighbouring rank went away",
        "look for the rank that went first",
        _RING,
        Kind.SYMPTOM,
    ),
    Signature(
        "ring.recv_old",
        r"\[ring\] Receiving from socket (?P<socket>\d+) failed with errno (?P<errno>\d+)",
        "receiving from a neighbouring rank failed: {errno}",
        "look for the rank that went first; before mlx 0.32.1 the others hang after this",
        _RING,
        Kind.SYMPTOM,
    ),
    Signature(
        "ring.too_many",
        r"\[ring\] Too many send/recv errors\. (?P<what>Aborting|Failing)",
        "the ring gave up after its connections failed",
        "look for the rank or the link that went first",
        _RING,
        Kind.SYMPTOM,
    ),
    Signature(
        "ring.2gib",
        r"\[ring\] Sending to socket (?P<socket>\d+) failed with errno 22",
        "one message of 2 GiB or more does not go through a macOS socket",
        "use mlx 0.32.1 or newer on every node",
        _RING,
    ),
    Signature(
        "ring.neighbor",
        r"\[(?:ring|jaccl)\].*only supported to direct neighbors|In ring mode send is only supported",
        "the program sends to a rank that is not its neighbour in the ring",
        "use jaccl's mesh, or order the ranks so",
        _RING,
    ),
    Signature(
        "any.no_split",
        r"\[(?P<backend>ring|jaccl)\] Group split not supported",
        "{backend} has no groups within the group",
        "use one parallel dimension",
        "mlx/distributed",
    ),
    Signature(
        "ring.no_sum_scatter",
        r"\[ring\] sum_scatter not supported",
        "the ring has no sum_scatter, which fully sharded training needs",
        'use strategy = "data", or jaccl',
        _RING,
    ),
    Signature(
        "dist.unavailable",
        r"Cannot initialize (?P<backend>\w+) distributed backend",
        "this MLX cannot use the {backend} backend here",
        "check macOS, the installed mlx and RDMA; or use ring",
        "mlx/distributed",
    ),
    Signature(
        "jaccl.rtr22",
        r"\[jaccl\] Changing queue pair to RTR failed with errno 22",
        "a Thunderbolt port has no IPv4 address of its own, so RDMA cannot address it",
        "take the port out of the bridge and give it its own IPv4 address",
        _JACCL,
    ),
    Signature(
        "jaccl.gid",
        r"\[jaccl\] No IPv4-mapped GID",
        "a Thunderbolt port has no IPv4 address of its own, so RDMA cannot address it",
        "take the port out of the bridge and give it its own IPv4 address",
        _JACCL,
    ),
    Signature(
        "jaccl.rtr60",
        r"\[jaccl\] Changing queue pair to RTR failed with errno 60",
        "the RDMA port at the other end cannot be reached",
        "compare the hostfile's devices with the cables",
        _JACCL,
    ),
    Signature(
        "jaccl.nodev",
        r"\[jaccl\] Could(?: not|n't) (?:find|open) device (?P<device>rdma_\w+)",
        "this Mac has no RDMA device {device} any more",
        "read the devices anew: names change with reboots and cables",
        _JACCL,
    ),
    Signature(
        "jaccl.connect",
        r"\[jaccl\] Couldn't connect \(error: (?P<errno>\d+)",
        "rank 0's coordinator could not be reached: {errno}",
        "check rank 0's first address and its port",
        _JACCL,
        Kind.SYMPTOM,
    ),
    Signature(
        "jaccl.recv2",
        r"\[jaccl\] Recv failed with errno=2",
        "rank 0's coordinator went away",
        "look for the rank that went first",
        _JACCL,
        Kind.SYMPTOM,
    ),
    Signature(
        "jaccl.wc",
        r"\[jaccl\] (?:Send|Recv) failed with error code (?P<code>\d+)",
        "an RDMA transfer failed (code {code})",
        "look for the rank or the cable that went first",
        _JACCL,
        Kind.SYMPTOM,
    ),
    Signature(
        "metal.timeout",
        r"kIOGPUCommandBufferCallbackErrorTimeout",
        "the GPU waited too long inside one command buffer, as it does for a slower or dead peer",
        "communicate on the CPU stream after evaluating, and balance the shares",
        "Metal",
    ),
    Signature(
        "metal.oom",
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Insufficient Memory \(00000008",
        "the GPU's memory did not suffice",
        "use a smaller batch or shorter sequences, grad_checkpoint, or fewer layers",
        "Metal",
    ),
    Signature(
        "metal.malloc",
        r"\[(?:metal::)?malloc\] (?:Unable to allocate|Attempting to allocate|Resource limit)",
        "one array was larger than Metal gives out at once",
        "use shorter sequences or a smaller batch",
        "mlx/backend/metal/allocator.cpp",
    ),
    Signature(
        "memory.python",
        r"\bMemoryError\b|std::bad_alloc",
        "there was not enough memory",
        "use a smaller batch or shorter sequences",
        "Python, C++",
    ),
    Signature(
        "memory.killed",
        r"[Oo]ut of memory: Killed process|oom-kill",
        "the operating system killed the rank for want of memory",
        "use a smaller batch or shorter sequences",
        "Linux",
    ),
    Signature(
        "disk.full",
        r"No space left on device|Errno 28\b|Disk quota exceeded",
        "the disk was full",
        "make room where the checkpoints and logs lie, then launch again",
        "errno(3)",
    ),
    Signature(
        "disk.read_only",
        r"Read-only file system",
        "the file system cannot be written to",
        "write to another place, or mount it writable",
        "errno(3)",
    ),
    Signature(
        "lora.batch_div",
        r"The batch size must be divisible by the number of workers",
        "the global batch does not divide by the number of ranks",
        "choose a batch_size that does",
        _LM,
    ),
    Signature(
        "lora.dataset_small",
        r"Dataset must have at least batch_size=(?P<batch>\d+) examples but only has (?P<examples>\d+)",
        "the data set has {examples} examples, fewer than the batch of {batch}",
        "use a smaller batch_size, or more data",
        _LM,
    ),
    Signature(
        "lora.layers",
        r"Requested to train (?P<wanted>\d+) layers but the model only has (?P<layers>\d+) layers",
        "num_layers is {wanted}, and the model has {layers} layers",
        "set num_layers to -1 (all) or at most {layers}",
        _LM,
    ),
    Signature(
        "lora.no_train",
        r"Training set not found or empty",
        "no training data was found on this host",
        "check `data`: it needs a train.jsonl on every node",
        "mlx_lm/lora.py",
    ),
    Signature(
        "hf.offline",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled",
        "the model is not on this host, and runs do not download",
        "copy the model there and name it by its path",
        "huggingface_hub",
    ),
    Signature(
        "hf.repoid",
        r"HFValidationError: Repo id must",
        "the model's directory does not exist on this host",
        "copy the model there, or correct `model`",
        "huggingface_hub",
    ),
    Signature(
        "ssh.refused",
        r"ssh: connect to host (?P<host>\S+) port (?P<port>\d+): (?P<why>.+)",
        "{host} does not take ssh on port {port}: {why}",
        "switch Remote Login on there, or correct the address",
        "ssh",
    ),
    Signature(
        "ssh.denied",
        r"Permission denied \((?:publickey|password|keyboard-interactive)",
        "the node refused our ssh key",
        "add this machine's key to the node's authorized_keys",
        "ssh",
    ),
    Signature(
        "ssh.host_key",
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the node's host key is not the known one",
        "find out why before you trust it",
        "ssh",
    ),
    Signature(
        "import.mlx",
        r"ModuleNotFoundError: No module named '(?P<module>mlx[\w.]*)'",
        "{module} is not installed in that node's environment",
        "install the same mlx and mlx-lm on every node",
        "Python",
    ),
    Signature(
        "import.other",
        r"ModuleNotFoundError: No module named '(?P<module>[\w.]+)'",
        "the Python module {module} is missing on this host",
        "install it in that node's environment",
        "Python",
    ),
)
