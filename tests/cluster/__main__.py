"""Test clusters by hand: `uv run python -m tests.cluster up 4`; from another terminal `cut ana`, `heal`, `down`.

The cluster lives as long as its `up` does: ctrl+c, `down` or any other end of it takes the nodes away.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.node.processes import alive
from tests.cluster import capability
from tests.cluster.cluster import Cluster
from tests.cluster.command import CommandFailed
from tests.cluster.fallback import LoopbackCluster
from tests.cluster.faults import Traffic
from tests.cluster.mac.cluster import PLACES_FILE, MacCluster, MacNode
from tests.cluster.mac.personality import CABLINGS, PERSONALITIES, USUAL, USUAL_CABLES
from tests.cluster.node import Node
from tests.cluster.registry import Record

KINDS = (Cluster, LoopbackCluster)
BY_HAND = "by-hand"
"""Marks the folder of a cluster that `up` holds: others are a test session's, and are left alone unless named."""
PLAIN: dict[str, Callable[[Node], object]] = {
    "link-down": Node.link_down,
    "link-up": Node.link_up,
    "power-off": Node.power_off,
    "power-on": Node.power_on,
    "sshd-stop": Node.stop_sshd,
    "sshd-start": Node.start_sshd,
    "sshd-freeze": Node.freeze_sshd,
    "sshd-thaw": Node.thaw_sshd,
    "reset-ssh": Node.reset_ssh,
    "sleep": Node.sleep,
    "wake": Node.wake,
    "host-key": Node.change_host_key,
    "noisy-bashrc": Node.noisy_bashrc,
    "fill-disk": Node.fill_disk,
    "free-disk": Node.free_disk,
}
"""Commands whose one argument is the node."""


def main(argv: list[str]) -> int:
    """Run one command; the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return run(arguments)
    except (CommandFailed, LookupError, ValueError, OSError) as error:
        print(f"tests.cluster: {error.args[0] if isinstance(error, LookupError) else error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    whole.add_argument("--cluster", type=int, help="its number, where there are several (see list)")
    commands = whole.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring a cluster up and hold it until ctrl+c or `down`")
    up.add_argument("size", type=int, nargs="?", default=4)
    up.add_argument("--loopback", action="store_true", help="sshds on loopback ports, without namespaces")
    macs = f"Macs instead: {', '.join(PERSONALITIES)}, for the nodes in turn ({USUAL} by itself)"
    up.add_argument("--mac", nargs="*", metavar="PERSONALITY", help=macs)
    up.add_argument("--cables", choices=CABLINGS, default=USUAL_CABLES, help="how the Macs are cabled (%(default)s)")
    up.add_argument("--bare", action="store_true", help="without the demo's model and data on the nodes")
    up.add_argument("--detach", action="store_true", help="hold it in a process of its own, and return")
    commands.add_parser("down", help="take a cluster away")
    commands.add_parser("list", help="the clusters and their nodes; clears away what dead owners left")
    heal = commands.add_parser("heal", help="undo every fault of some nodes, or of all")
    heal.add_argument("nodes", nargs="*")
    for name in ("cut", "lossy", "reject"):
        filtered = commands.add_parser(name, help="a packet filter's fault; undone by heal")
        filtered.add_argument("node")
        filtered.add_argument("--traffic", type=Traffic, choices=list(Traffic), default=None)
        filtered.add_argument("--peer", help="only with this node, or `head`")
    slow = commands.add_parser("slow", help="limit a node's link; undone by heal")
    slow.add_argument("node")
    slow.add_argument("rate", nargs="?", default="10mbit")
    for name in PLAIN:
        commands.add_parser(name).add_argument("node")
    fault = commands.add_parser("mac-fault", help="a Mac's command is late, cut or failing; undone by heal")
    fault.add_argument("node")
    fault.add_argument("program")
    fault.add_argument("--late-s", type=float, default=argparse.SUPPRESS)
    fault.add_argument("--cut", type=int, default=argparse.SUPPRESS, help="of its output so many characters")
    fault.add_argument("--output", default=argparse.SUPPRESS, help="instead of its own")
    fault.add_argument("--errors", default=argparse.SUPPRESS, help="on its standard error")
    fault.add_argument("--exit-code", type=int, default=argparse.SUPPRESS)
    sshd = commands.add_parser("sshd-set", help="restart sshd with options, as MaxSessions=3")
    sshd.add_argument("node")
    sshd.add_argument("options", nargs="+", metavar="KEY=VALUE")
    processes = commands.add_parser("processes", help="what runs on a node as its user")
    processes.add_argument("node")
    processes.add_argument("nonce", nargs="?")
    inside = commands.add_parser("run", help="run a command on a node as its user, without ssh")
    inside.add_argument("node")
    inside.add_argument("argv", nargs=argparse.REMAINDER)
    return whole


def run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "up" if arguments.detach:
            return detach([word for word in sys.argv[1:] if word != "--detach"])
        case "up":
            return up(arguments)
        case "down":
            return down(only(arguments.cluster))
        case "list":
            return show()
    cluster = only(arguments.cluster)
    if arguments.command == "heal":
        for node in map(cluster.__getitem__, arguments.nodes) if arguments.nodes else cluster.nodes:
            node.heal(all_faults=True)
        return 0
    return run_on_node(cluster, arguments)


def run_on_node(cluster: Cluster, arguments: argparse.Namespace) -> int:
    node = cluster[arguments.node]
    match arguments.command:
        case "cut" | "lossy" | "reject":
            usual = Traffic.SSH if arguments.command == "reject" else Traffic.EVERYTHING
            peer = address_of(cluster, arguments.peer) if arguments.peer else None
            fault = getattr(node, arguments.command)
            fault(traffic=arguments.traffic or usual, peer=peer)
        case "slow":
            node.slow_link(arguments.rate)
        case "mac-fault":
            if not isinstance(node, MacNode):
                raise LookupError(f"{node.name} is no Mac: up --mac")
            kinds = ("late_s", "cut", "output", "errors", "exit_code")
            node.set_fault(arguments.program, **{kind: vars(arguments)[kind] for kind in kinds if kind in arguments})
        case "sshd-set":
            node.configure_sshd(**dict(option.split("=", 1) for option in arguments.options))
        case "processes":
            for process in node.processes(arguments.nonce):
                # An agent's arguments are the text of a program.
                print(process.pid, " ".join(process.command.split())[:150])
        case "run":
            done = node.run([word for word in arguments.argv if word != "--"])
            print(done.stdout, end="")
            print(done.stderr, end="", file=sys.stderr)
            return done.returncode
        case plain:
            PLAIN[plain](node)
    return 0


def up(arguments: argparse.Namespace) -> int:
    """Hold a cluster until a signal ends it. Raises LookupError, ValueError."""
    size, loopback = arguments.size, arguments.loopback
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if arguments.mac is not None and (loopback or (reason := capability.missing())):
        raise ValueError(f"--mac needs {'no --loopback' if loopback else reason}")
    if not loopback and (reason := capability.missing()):
        print(f"needs {reason}: sshds on loopback instead; nothing can be cut or switched off", file=sys.stderr)
        loopback = True
    begun = time.monotonic()
    if arguments.mac is not None:
        made: Cluster = MacCluster(size, arguments.mac, arguments.cables)
    else:
        made = LoopbackCluster(size) if loopback else Cluster(size)
    with made as cluster:
        ready = time.monotonic() - begun
        # Not at the top: this imports the engine's configuration, and the other commands need not wait for that.
        from engine.security.paths import state_home
        from tests.cluster.demo_job import install_demo, write_toml

        if not arguments.bare:
            install_demo(cluster, state_home())
        toml = write_toml(cluster)
        (cluster.folder / BY_HAND).touch()
        print(f"cluster {cluster.record.number}: {size} nodes up in {ready:.1f} s; its files: {cluster.folder}")
        for node in cluster.nodes:
            print(f"  {node.name:6} {node.ssh:18} {node.home:20} {node.python}")
        where = f"FLIGHTDECK_SSH_CONFIG={shlex.quote(str(cluster.ssh_config))}"
        print(f"\n{toml.read_text()}\ntry:")
        print(f"  {where} uv run flightdeck -c {toml}")
        print(f"  ssh -F {shlex.quote(str(cluster.ssh_config))} {cluster.nodes[0].name}", flush=True)
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            return 0


def detach(words: list[str]) -> int:
    """Hold a cluster in a process of its own, with these arguments; what it says first is shown here."""
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    assert keeper.stdout is not None
    for line in keeper.stdout:
        print(line, end="")
        if line.startswith("  ssh -F"):
            return 0
    return keeper.wait()


def down(cluster: Cluster) -> int:
    """Ask the cluster's owner to end, and await it. Raises LookupError for a cluster that tests hold."""
    if not (cluster.folder / BY_HAND).exists():
        raise LookupError(f"cluster {cluster.record.number} belongs to the tests of process {cluster.record.owner}")
    owner, start = cluster.record.owner, cluster.record.owner_start
    os.kill(owner, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while alive(owner, start):
        if time.monotonic() > deadline:
            raise CommandFailed(f"process {owner} still holds cluster {cluster.record.number}")
        time.sleep(0.01)
    return 0


def show() -> int:
    for kind in KINDS:
        for number in kind.registry.clear_stale():
            print(f"cluster {number} was left by a process that is gone: cleared away")
        for record in kind.registry.clusters():
            print(f"cluster {record.number}, held by process {record.owner}; its files: {record.folder}")
            for node in attached(kind, record).nodes:
                print(f"  {node.name:6} {node.ssh:18} {'on' if node.pid else 'off'}")
    return 0


def only(number: int | None) -> Cluster:
    """The cluster of that number, else the only one that `up` holds. Raises LookupError."""
    found = [(kind, record) for kind in KINDS for record in kind.registry.clusters()]
    meant = [
        (kind, record)
        for kind, record in found
        if number == record.number or (number is None and (record.folder / BY_HAND).exists())
    ]
    if len(meant) != 1:
        there = ", ".join(str(record.number) for _, record in found) or "none"
        raise LookupError(f"which cluster? --cluster NUMBER; there are: {there}")
    kind, record = meant[0]
    return attached(kind, record)


def attached(kind: type[Cluster], record: Record) -> Cluster:
    return (MacCluster if (record.folder / PLACES_FILE).exists() else kind).attach(record.number)


def address_of(cluster: Cluster, name: str) -> str:
    return cluster.head if name == "head" else cluster[name].ip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
