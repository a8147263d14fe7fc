"""What mlx.launch, mlx.distributed_config and the shell that starts a rank print."""

from __future__ import annotations

from typing import Final

from engine.runs.signatures.signature import Kind, Proof, Signature

_LAUNCH: Final = "mlx/_distributed_utils/launch.py"
_CONFIG: Final = "mlx/_distributed_utils/config.py"

SIGNATURES: Final[tuple[Signature, ...]] = (
    Signature(
        "launch.rank_exit",
        r"Node with rank (?P<rank>\d+) exited with code (?P<code>-?\d+)",
        "rank {rank} exited with code {code}",
        "read that rank's log",
        "[WARN] Node with rank 3 exited with code -15",
        _LAUNCH,
        Proof.REPRODUCED,
        Kind.NOISE,
    ),
    Signature(
        "launch.rank_killed",
        r"Node with rank (?P<rank>\d+) was killed",
        "mlx.launch killed rank {rank} because another one had failed",
        "look for the first rank that failed",
        "[WARN] Node with rank 2 was killed",
        _LAUNCH,
        Proof.SOURCE,
        Kind.NOISE,
    ),
    Signature(
        "launch.remote_kill_failed",
        r"CalledProcessError: Command 'ssh (?P<host>\S{1,255}) 'pid=\$\(cat ",
        "mlx.launch could not kill the rank on {host}: it takes a wrong name for the file that holds its pid",
        "nothing: Flight Deck ends that rank itself",
        "subprocess.CalledProcessError: Command 'ssh mini-2 'pid=$(cat /tmp/tmp.ohwf); if ps -p $pid >/dev/null; then",
        f"{_LAUNCH}, mlx 0.32.4 over a real sshd",
        Proof.REPRODUCED,
        Kind.NOISE,
    ),
    Signature(
        "launch.python_missing",
        r"exec: (?P<command>[^/\s]\S{0,255}): (?:cannot execute: )?(?:not found|No such file)",
        "{command} is not a program on this host: since mlx 0.32.0 a script is not run by python unless that is said",
        "begin the command with the interpreter's absolute path on that node, `python` of its [[node]]",
        "/bin/bash: line 1: exec: train.py: not found",
        "ml-explore/mlx#3536",
        Proof.REPRODUCED,
    ),
    Signature(
        "launch.interp_missing",
        r"sh: (?:line )?\d+: (?:exec: )?(?P<path>/\S{1,1000}): (?:cannot execute: )?(?:not found|No such file)",
        "{path} does not exist on this host",
        "make the environment there, or give that [[node]] the absolute path of its interpreter as `python`",
        "/bin/bash: line 1: /opt/train/.venv/bin/python: No such file or directory",
        "bash and dash under mlx.launch",
        Proof.REPRODUCED,
    ),
    Signature(
        "launch.py_double",
        r"SyntaxError: source code cannot contain null bytes",
        "python was given an interpreter to run as if it were a script: mlx up to 0.31.2 adds its own python",
        "install mlx 0.32.1 or newer on every node",
        "SyntaxError: source code cannot contain null bytes",
        f"{_LAUNCH}, mlx 0.31.2",
        Proof.REPRODUCED,
    ),
    Signature(
        "launch.ring_needs_ip",
        r"The ring backend requires IPs to be provided instead of hostnames",
        "a node has no IP address in the hostfile",
        "give that [[node]] its `ips`",
        "mlx.launch: error: The ring backend requires IPs to be provided instead of hostnames",
        _LAUNCH,
        Proof.REPRODUCED,
    ),
    Signature(
        "launch.hostfile_rdma",
        r"(?:The hostfile is malformed: |Malformed hostfile for )(?P<why>.{1,300})",
        "mlx.launch refuses the hostfile's RDMA devices: {why}",
        "name one device for every pair of nodes and none of a node with itself; `flightdeck nodes` reads them",
        "mlx.launch: error: The hostfile is malformed: RDMA device of self should be null",
        _LAUNCH,
        Proof.REPRODUCED,
    ),
    Signature(
        "launch.log_warning_nameerror",
        r"NameError: name 'log_warning' is not defined",
        "mlx.distributed_config of mlx 0.30.1 fails by itself when it wants to warn of something",
        "install mlx 0.32.1 or newer; Flight Deck writes the hostfile without that program",
        "NameError: name 'log_warning' is not defined",
        "ml-explore/mlx#2944",
        Proof.REPORTED,
    ),
    Signature(
        "config.domain_uuid",
        r"KeyError: 'domain_uuid_key'",
        "an older mlx.distributed_config takes a display or dock at a Thunderbolt port for a Mac",
        "install mlx 0.32.1 or newer, or unplug the display; Flight Deck reads the ports itself",
        "KeyError: 'domain_uuid_key'",
        "ml-explore/mlx#2538",
        Proof.REPORTED,
    ),
    Signature(
        "config.rdma_off",
        r"does not seem to have RDMA enabled|don't have RDMA enabled or they don't support RDMA",
        "a Mac has RDMA switched off, or no Thunderbolt 5",
        "start that Mac in Recovery, run `rdma_ctl enable` in its Terminal and restart; or use the ring",
        "[WARN] studio-2 does not seem to have RDMA enabled",
        _CONFIG,
        Proof.SOURCE,
    ),
    Signature(
        "config.mesh",
        r"Incomplete mesh, (?P<a>\S{1,255}) is not connected to (?P<b>\S{1,255})",
        "no Thunderbolt cable joins {a} and {b}, and jaccl's mesh needs one between every two Macs",
        "add the cable, or choose jaccl-ring or ring",
        "[ERROR] Incomplete mesh, studio-1 is not connected to studio-3",
        _CONFIG,
        Proof.SOURCE,
    ),
)
