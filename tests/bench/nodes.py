"""Probing, measured: `uv run python -m tests.bench.nodes`.

Four real nodes of the test cluster, then 64 simulated ones: real sshds on 64 ports of 127.0.0.1, where
"python" is an agent that repeats what this machine's own facts and telemetry have just been. With those 64 the real
console is opened on a pseudo-terminal of 160x45, and keys are pressed while their telemetry pours in. Exits 1 when a
target is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import engine
from engine.api import Engine
from engine.cluster.facts import probe_all
from engine.cluster.transport.fleet import Fleet
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from tests.bench.figures import Figure, machine, report
from tests.bench.logs import KEY_P99_MS, quantile, read_for
from tests.cluster.cluster import Cluster
from tests.conftest import FLIGHTDECK
from tests.terminal import Terminal

REAL_S, SIMULATED_S = 2.0, 5.0
SIMULATED = 64
TELEMETRY_S = 2.0
LISTEN_SOCKETS = 16
"""That one sshd can have."""
CONSOLE_S = 80.0

PYTHON = """#!{python} -S
# Stands for a node's python: an agent that answers with recorded facts, and with one recorded sample of telemetry after
# the other. It starts no process, and the sshds are nice: 64 nodes share the console's cores here, and only here.
import sys
sys.path.insert(0, {source!r})
import json, os, select, time
from engine.protocol.messages import *
def send(message):
    data = encode(message)
    while data:
        data = data[os.write(1, data):]
os.write(1, json.dumps({{"kind": "bootstrap", "home": "/root", "missing": False}}).encode() + b"\\n")
send(Hello("boot", 0, time.time()))
facts, sample = (open(path, "rb").read() for path in ({facts!r}, {telemetry!r}))
decoder, streams, due = Decoder(), [], 0.0
while True:
    wait = max(0.0, due - time.monotonic()) if streams else None
    if select.select([0], [], [], wait)[0]:
        data = os.read(0, 65536)
        if not data:
            break
        for message in decoder.feed(data):
            if isinstance(message, Heartbeat):
                send(HeartbeatAck(message.number, time.time()))
            elif isinstance(message, ProbeRequest) and message.probe == "facts":
                time.sleep(0.1)
                send(RequestOutput(message.request, facts))
                send(RequestEnded(message.request, 0, ""))
            elif isinstance(message, ProbeRequest):
                streams.append(message.request)
            elif isinstance(message, CancelRequest) and message.request in streams:
                streams.remove(message.request)
    elif streams:
        for request in streams:
            send(RequestOutput(request, sample))
        due = time.monotonic() + {every}
"""
SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/sshd.{first}.pid
PermitRootLogin yes
UsePAM no
StrictModes no
SetEnv HOME={folder}
Subsystem sftp internal-sftp
"""


def config_of(nodes: list[NodeConfig]) -> Config:
    return Config(
        cluster=ClusterConfig(name="bench"), nodes=tuple(nodes), job=JobConfig(name="none", command=("true",))
    )


async def probed_s(nodes: list[NodeConfig], home: Path) -> float:
    """Seconds of a probe of all nodes, connecting included. Raises RuntimeError when one has not answered."""
    config = config_of(nodes)
    async with Fleet(home) as fleet:
        begun = time.perf_counter()
        facts = await probe_all(config, fleet)
        taken = time.perf_counter() - begun
    if lacking := [f"{fact.node}: {fact.problem}" for fact in facts if fact.problem]:
        raise RuntimeError("; ".join(lacking))
    return taken


def real(home: Path) -> Iterator[Figure]:
    """Four nodes with mlx to import, each in namespaces of its own, on the cores of this machine."""
    with Cluster(4) as cluster:
        os.environ["FLIGHTDECK_SSH_CONFIG"] = str(cluster.ssh_config)
        nodes = [
            NodeConfig(name=node.name, ssh=node.ssh, ips=(node.ip,), python=node.python, workdir="~")
            for node in cluster.nodes
        ]
        taken = [asyncio.run(probed_s(nodes, home)) for _ in range(5)]
    worst = max(taken)
    yield Figure("4 real nodes probed, slowest of 5", f"{worst:.2f} s", f"<= {REAL_S:.0f} s", worst <= REAL_S)


@contextlib.contextmanager
def simulated(folder: Path) -> Iterator[list[NodeConfig]]:
    """The 64 nodes; FLIGHTDECK_SSH_CONFIG points at the way to them."""
    facts, sample = asyncio.run(_recorded())
    (folder / "facts").write_bytes(facts)
    (folder / "telemetry").write_bytes(sample)
    python = folder / "python"
    shown = {name: str(folder / name) for name in ("facts", "telemetry")}
    source = str(Path(engine.__file__).parents[1])
    python.write_text(PYTHON.format(python=sys.executable, source=source, every=TELEMETRY_S, **shown))
    python.chmod(0o755)
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    ports = _free_ports(SIMULATED)
    host_key = (folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
    (folder / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {host_key}\n" for port in ports))
    (folder / "ssh_config").write_text(f"IdentityFile {folder}/key\nUserKnownHostsFile {folder}/known_hosts\n")
    os.environ["FLIGHTDECK_SSH_CONFIG"] = str(folder / "ssh_config")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or "/usr/sbin/sshd"
    with contextlib.ExitStack() as servers:
        for first in range(0, SIMULATED, LISTEN_SOCKETS):
            mine = ports[first : first + LISTEN_SOCKETS]
            file = folder / f"sshd_config.{first}"
            listens = "".join(f"ListenAddress 127.0.0.1:{port}\n" for port in mine)
            file.write_text(SSHD.format(folder=folder, first=first) + listens)
            argv = ["nice", "-n", "19", sshd, "-D", "-f", str(file), "-E", str(folder / "log")]
            server = servers.enter_context(subprocess.Popen(argv))
            servers.callback(server.terminate)
            _await_port(mine[-1])
        yield [
            NodeConfig(name=f"node{number}", ssh=f"root@127.0.0.1:{port}", python=str(python), workdir="~")
            for number, port in enumerate(ports)
        ]


async def _recorded() -> tuple[bytes, bytes]:
    """What this machine's facts and telemetry probes print."""
    here = NodeConfig(name="here", python=sys.executable, workdir="/")
    async with Fleet(Path("/nonexistent")) as fleet:
        request = await fleet.agent(here).start_probe("facts", "/")
        facts = await request.completed(30.0)
        sample = await (await fleet.agent(here).start_probe("telemetry", "1")).next_line(30.0)
        assert isinstance(sample, bytes)
    return facts.stdout, sample + b"\n"


def many(folder: Path) -> Iterator[Figure]:
    with simulated(folder) as nodes:
        home = folder / "home"
        taken = [asyncio.run(probed_s(nodes, home)) for _ in range(3)]
        worst = max(taken)
        limit = f"<= {SIMULATED_S:.0f} s"
        yield Figure(f"{SIMULATED} simulated nodes probed, slowest of 3", f"{worst:.2f} s", limit, worst <= SIMULATED_S)
        yield from console(folder, nodes)


def console(folder: Path, nodes: list[NodeConfig]) -> Iterator[Figure]:
    """The console on 64 nodes: `j` and `k` in the nodes view, answered by the line that the cursor comes to."""
    tables = "".join(f'[[node]]\nname = "{n.name}"\nssh = "{n.ssh}"\npython = "{n.python}"\n' for n in nodes)
    config = folder / "flightdeck.toml"
    config.write_text(f'[cluster]\nname = "bench"\n{tables}[job]\ncommand = ["true"]\n')
    console_home = folder / "console"
    environment = {"FLIGHTDECK_HOME": str(console_home)}
    own = Engine(console_home)
    own.nodes.accept(own.load_config(config).digest)
    waits: list[float] = []
    with Terminal([str(FLIGHTDECK), "-c", str(config)], size=(160, 45), env=environment) as terminal:
        terminal.read_until(b"node0")
        terminal.press(b"1")
        read_for(terminal, 8.0)
        moments, until = random.Random(7), time.monotonic() + CONSOLE_S
        while time.monotonic() < until:
            terminal.output.clear()
            begun = time.perf_counter()
            terminal.press(b" ")
            terminal.read_until(b"FROZEN")
            waits.append(time.perf_counter() - begun)
            read_for(terminal, moments.uniform(0.02, 0.1))
            terminal.press(b" ")
            for key in (b"j", b"j", b"k"):
                terminal.press(key)
                read_for(terminal, moments.uniform(0.02, 0.2))
        terminal.press(b"q")
        terminal.wait()
    p50, p99 = quantile(waits, 0.5) * 1000, quantile(waits, 0.99) * 1000
    yield Figure(f"key answered over {SIMULATED} nodes, p50 of {len(waits)}", f"{p50:.1f} ms")
    yield Figure(
        f"key answered over {SIMULATED} nodes, p99", f"{p99:.1f} ms", f"< {KEY_P99_MS:.0f} ms", p99 < KEY_P99_MS
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def main() -> int:
    print(machine())
    with TemporaryDirectory() as directory:
        root = Path(directory)
        figures = [*real(root / "home")]
        return report([*figures, *many(root)])


if __name__ == "__main__":
    sys.exit(main())
