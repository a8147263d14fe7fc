"""What MLX's ring backend prints, and what all backends say alike."""

from __future__ import annotations

from typing import Final

from engine.models import Reason
from engine.runs.signatures.signature import Kind, Proof, Signature

_RING: Final = "mlx/distributed/ring"

SIGNATURES: Final[tuple[Signature, ...]] = (
    Signature(
        "ring.bind",
        r"\[ring\] Couldn't bind socket \(error: (?P<errno>\d+)",
        "the ring could not listen on its port: {errno}",
        "end what holds the port (an earlier run's rank?), or correct the node's address",
        "RuntimeError: [ring] Couldn't bind socket (error: 48)",
        f"{_RING}, ml-explore/mlx#1903",
        Proof.REPRODUCED,
        reason=Reason.LAUNCH_FAILED,
    ),
    Signature(
        "ring.connect_retry",
        r"\[ring\] Attempt (?P<number>\d+) waiting (?P<ms>\d+) ms \(error: (?P<errno>\d+)",
        "the peer does not listen yet",
        "nothing, while it happens once or twice; from the fourth time on see whether that rank has started",
        "[ring] Attempt 1 waiting 2000 ms (error: 61 )",
        _RING,
        Proof.REPRODUCED,
        Kind.NOISE,
    ),
    Signature(
        "ring.connect",
        r"\[ring\] Couldn't connect \(error: (?P<errno>\d+)",
        "the ring could not connect to a peer: {errno}",
        "see whether that peer's rank has started; if it has, check the node's address, the firewall and, on macOS, "
        "Local Network privacy (ping may work all the same)",
        "RuntimeError: [ring] Couldn't connect (error: 111)",
        "ml-explore/mlx#3755, ml-explore/mlx#1903, exo-explore/exo#2309",
        Proof.REPORTED,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "ring.peer_lost_new",
        r"\[ring\] connection to a peer was lost",
        "the connection to a peer was lost",
        "look for the rank or the link that went first",
        "RuntimeError: [ring] connection to a peer was lost",
        "ml-explore/mlx#4060, mlx 0.32.1 and newer",
        Proof.REPRODUCED,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "ring.peer_closed",
        r"\[ring\] Socket (?P<socket>\d+) was closed by the peer",
        "a neighbouring rank went away",
        "look for the rank that went first",
        "[ring] Socket 5 was closed by the peer",
        _RING,
        Proof.REPRODUCED,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "ring.recv_old",
        r"\[ring\] Receiving from socket (?P<socket>\d+) failed with errno (?P<errno>\d+)",
        "receiving from a neighbouring rank failed: {errno}",
        "look for the rank that went first, and install mlx 0.32.1 or newer: older ones hang after this",
        "[ring] Receiving from socket 7 failed with errno 104",
        "ml-explore/mlx#3862, ml-explore/mlx#4276",
        Proof.REPORTED,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "ring.too_many",
        r"\[ring\] Too many send/recv errors\. (?P<what>Aborting|Failing)",
        "the ring gave up after its connections failed",
        "look for the rank or the link that went first",
        "[ring] Too many send/recv errors. Failing pending tasks...",
        "ml-explore/mlx#3862",
        Proof.REPRODUCED,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "ring.send",
        r"\[ring\] Sending to socket (?P<socket>\d+) failed with errno (?!22\b)(?P<errno>\d+)",
        "sending to a neighbouring rank failed: {errno}",
        "look for the rank that went first",
        "[ring] Sending to socket 4 failed with errno 32",
        _RING,
        Proof.SOURCE,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "ring.2gib",
        r"\[ring\] Sending to socket (?P<socket>\d+) failed with errno 22\b",
        "one message of 2 GiB or more does not go through a macOS socket",
        "install mlx 0.32.1 or newer on every node, or send smaller arrays",
        "[ring] Sending to socket 6 failed with errno 22",
        "ml-explore/mlx#4280, ml-explore/mlx#4281",
        Proof.REPORTED,
    ),
    Signature(
        "ring.neighbor",
        r"only supported (?:to|from) direct neighbors|In ring mode (?:send|recv) is only supported",
        "the program exchanges data with a rank that is not its neighbour in the ring",
        "order the ranks so that it is one, or use jaccl's mesh",
        "[ring] Recv only supported from direct neighbors but tried to recv from 0 to 2",
        _RING,
        Proof.REPRODUCED,
    ),
    Signature(
        "any.no_split",
        r"\[(?P<backend>ring|jaccl)\] Group split not supported",
        "the program divides the ranks into smaller groups, and {backend} has only the one of all",
        "use one kind of parallelism at a time",
        "RuntimeError: [jaccl] Group split not supported.",
        "mlx/distributed",
        Proof.REPRODUCED,
    ),
    Signature(
        "ring.no_sum_scatter",
        r"\[ring\] sum_scatter not supported",
        "the ring has no sum_scatter, which mlx's own fully_shard needs",
        'use strategy = "sharded", which does without it, or jaccl',
        "RuntimeError: [ring] sum_scatter not supported.",
        _RING,
        Proof.REPRODUCED,
    ),
    Signature(
        "dist.unavailable",
        r"Cannot initialize (?P<backend>\w{1,20}) distributed backend",
        "this MLX cannot use the {backend} backend on this host",
        "check the installed mlx and, for jaccl, macOS 26.2 and RDMA; or use the ring",
        "RuntimeError: Cannot initialize nccl distributed backend.",
        "mlx/distributed",
        Proof.REPRODUCED,
    ),
)
