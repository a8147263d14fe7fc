"""What MLX's jaccl backend, RDMA over Thunderbolt, prints. None of it can be reproduced without such Macs."""

from __future__ import annotations

from typing import Final

from engine.runs.signatures.signature import Kind, Proof, Signature

_JACCL: Final = "mlx/distributed/jaccl"

SIGNATURES: Final[tuple[Signature, ...]] = (
    Signature(
        "jaccl.rtr22",
        r"\[jaccl\] Changing queue pair to RTR failed with errno 22\b",
        "RDMA cannot address a Thunderbolt port: it has no IPv4 address of its own, often because a bridge has it",
        "take the port out of the bridge and give it an IPv4 address of its own (`networksetup -setmanual`)",
        "RuntimeError: [jaccl] Changing queue pair to RTR failed with errno 22",
        "ml-explore/mlx#3467, ml-explore/mlx#4191, exo-explore/exo#1390",
        Proof.REPORTED,
    ),
    Signature(
        "jaccl.gid",
        r"\[jaccl\] No IPv4-mapped GID",
        "RDMA cannot address a Thunderbolt port: it publishes no address made from an IPv4 one",
        "take the port out of the bridge and give it an IPv4 address of its own (`networksetup -setmanual`)",
        "RuntimeError: [jaccl] No IPv4-mapped GID for this device. Thunderbolt RDMA ports only publish one once",
        "ml-explore/mlx#4191, mlx 0.32.1 and newer",
        Proof.SOURCE,
    ),
    Signature(
        "jaccl.rtr60",
        r"\[jaccl\] Changing queue pair to RTR failed with errno 60\b",
        "the RDMA port at the other end does not answer: the hostfile pairs the wrong ports, or that one is down",
        "compare the hostfile's devices with the cables; trying again without a change makes it worse",
        "RuntimeError: [jaccl] Changing queue pair to RTR failed with errno 60",
        "ml-explore/mlx#3910, exo-explore/exo#1847",
        Proof.REPORTED,
    ),
    Signature(
        "jaccl.qp16",
        r"\[jaccl\] (?:Creating the queue pair failed.{0,80}\(16\)"
        r"|Changing queue pair to \w{1,10} failed with errno 16\b)",
        "the RDMA device has no queue pair left: another program uses it, or an earlier one has not given them back",
        "end the other programs that use RDMA on that Mac; if there are none, restart it",
        "RuntimeError: [jaccl] Changing queue pair to INIT failed with errno 16",
        "ml-explore/mlx#3162, ml-explore/mlx#3207, ml-explore/mlx#4209",
        Proof.REPORTED,
    ),
    Signature(
        "jaccl.pd",
        r"\[jaccl\] Couldn't allocate protection domain",
        "an RDMA device could not be opened for use: its port is down, or it was opened too often since a restart",
        "name a device whose port `ibv_devinfo` calls PORT_ACTIVE; if it is one already, restart that Mac",
        "RuntimeError: [jaccl] Couldn't allocate protection domain",
        "ml-explore/mlx#3910, ml-explore/mlx#3207",
        Proof.REPORTED,
    ),
    Signature(
        "jaccl.nodev",
        r"\[jaccl\] Could(?: not|n't) (?:find|open) device (?P<device>rdma_\w{1,32})",
        "this Mac has no RDMA device {device} now",
        "read the devices anew with `flightdeck nodes`: their names change with restarts and cables",
        "RuntimeError: [jaccl] Could not find device rdma_en4 (2 available)",
        "ml-explore/mlx#4180",
        Proof.SOURCE,
    ),
    Signature(
        "jaccl.recv2",
        r"\[jaccl\] Recv failed with errno=2\b",
        "rank 0, through which the ranks find each other, went away",
        "look for the rank that went first",
        "RuntimeError: [jaccl] Recv failed with errno=2",
        "ml-explore/mlx#3910, exo-explore/exo#1847",
        Proof.REPORTED,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "jaccl.connect",
        r"\[jaccl\] Couldn't connect \(error: (?P<errno>\d+)",
        "rank 0, through which the ranks find each other over TCP, could not be reached: {errno}",
        "see whether rank 0 has started; if it has, make its first address and port reachable from every node",
        "RuntimeError: [jaccl] Couldn't connect (error: 60)",
        "ml-explore/mlx#3755",
        Proof.REPORTED,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "jaccl.wc",
        r"\[jaccl\] (?:Send|Recv) failed with error code (?P<code>\d+)",
        "an RDMA transfer was not completed (code {code}; 12 is no answer after all repetitions)",
        "look for the rank or the cable that went first",
        "RuntimeError: [jaccl] Recv failed with error code 12",
        _JACCL,
        Proof.SOURCE,
        Kind.CONSEQUENCE,
    ),
    Signature(
        "jaccl.mr",
        r"\[jaccl\] Register memory region failed",
        "RDMA could not take another piece of memory: a device takes about a hundred in all",
        "end the other programs that use RDMA on that Mac; if there are none, restart it",
        "RuntimeError: [jaccl] Register memory region failed",
        "ml-explore/mlx#3162",
        Proof.REPORTED,
    ),
    Signature(
        "jaccl.topology",
        r"should define a valid mesh or a valid ring",
        "the hostfile's RDMA devices join the Macs neither each with each nor one after the other round",
        "complete the devices in the hostfile, or use the ring",
        "RuntimeError: [jaccl] The configuration should define a valid mesh or a valid ring.",
        _JACCL,
        Proof.SOURCE,
    ),
)
