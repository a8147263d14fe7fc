"""A node is asked once and answers with facts, or with the reason why it did not."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePath

import pytest

from engine.config.models import ClusterConfig, FlightConfig, JobConfig, NodeConfig
from engine.errors import HostKeyUnknown, NodeUnreachable
from engine.models import NodeFacts
from engine.nodes.probe import SCRIPT, probe, probe_all, probing
from engine.transport.base import Completed, Transport
from engine.transport.local import LocalTransport

NOW = datetime(2026, 11, 21, tzinfo=UTC)
Script = Callable[[str], NodeConfig]


@pytest.fixture
def scripted(tmp_path: Path) -> Script:
    """A node whose python is a shell script with this body."""

    def node(body: str) -> NodeConfig:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
        return NodeConfig(name="ultra", python=str(python), workdir=str(tmp_path))

    return node


class Way(LocalTransport):
    """This machine, with a word of its own for each run."""

    def __init__(self, answer: Completed | Exception, round_trip_s: float | None = 0.004) -> None:
        self.answer = answer
        self.round_trip = round_trip_s
        self.runs: list[list[str]] = []

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", directory: PurePath | None = None
    ) -> Completed:
        self.runs.append(list(argv))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def round_trip_s(self) -> float | None:
        return self.round_trip


class Ways:
    def __init__(self, **ways: Transport) -> None:
        self.ways = ways

    def to(self, node: NodeConfig) -> Transport:
        return self.ways[node.name]


def config(*nodes: NodeConfig) -> FlightConfig:
    return FlightConfig(cluster=ClusterConfig(), nodes=nodes, job=JobConfig(name="job", command=("true",)))


def told(**fields: object) -> Completed:
    """The script's answer, among the noise of a login shell."""
    line = json.dumps({"flightdeck": "facts", "system": "Linux", "answers": {}, **fields})
    return Completed(0, b"noise of a .bashrc\n\n" + line.encode() + b"\n", b"")


async def test_this_machine(tmp_path: Path) -> None:
    began = time.monotonic()
    node = NodeConfig(name="here", python=sys.executable, workdir=str(tmp_path / "not" / "yet"))
    facts = await probe(node, LocalTransport())
    assert time.monotonic() - began < 5
    assert (facts.node, facts.host, facts.problem, facts.late) == ("here", "127.0.0.1", None, ())
    assert facts.python == platform.python_version()
    assert facts.mlx == importlib.metadata.version("mlx")
    assert facts.mlx_lm == importlib.metadata.version("mlx-lm")
    assert facts.gpu in ("cpu", "gpu")
    assert "ring" in facts.backends
    assert facts.os and facts.os_version and facts.chip and facts.cores
    assert (facts.hostname, facts.home) == (platform.node(), str(Path.home()))
    assert facts.memory_total_bytes and facts.memory_used_bytes
    assert 0 < facts.memory_used_bytes < facts.memory_total_bytes
    assert facts.disk_free_bytes and facts.disk_total_bytes and facts.disk_free_bytes <= facts.disk_total_bytes
    assert facts.round_trip_s is None
    assert facts.clock_skew_s is not None and abs(facts.clock_skew_s) < 0.5
    assert any(address.startswith("127.0.0.1/") for port in facts.interfaces for address in port.ipv4)
    if sys.platform == "linux":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert facts.memory_total_bytes == pytest.approx(pages, rel=0.01)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("echo 'dyld: Library not loaded' >&2; exit 134", "the probe ended with 134: dyld: Library not loaded"),
        ("exit 0", "the probe ended with 0"),
        ("printf '\\033]0;owned\\007gone\\n' >&2; exit 1", "the probe ended with 1: gone"),
        ("echo '[1, 2]'; echo nonsense; exit 0", "the probe ended with 0: nonsense"),
        ("exec sh -c /nowhere/python 2>/dev/null", "no such interpreter: PYTHON"),
    ],
)
async def test_an_interpreter_that_fails_is_a_problem_in_one_line(scripted: Script, body: str, problem: str) -> None:
    node = scripted(body)
    facts = await probe(node, LocalTransport())
    assert facts.problem == problem.replace("PYTHON", node.python)
    assert [facts.python, facts.mlx, facts.cores] == [None] * 3


async def test_an_interpreter_that_hangs_is_given_up(scripted: Script) -> None:
    facts = await probe(scripted("sleep 600"), LocalTransport(), time_limit_s=0.2)
    assert "within 0.2 s" in (facts.problem or "")


async def test_an_interpreter_that_is_not_there_or_is_no_program_is_named(tmp_path: Path) -> None:
    facts = await probe(NodeConfig(name="a", python="/nonexistent/python", workdir="/"), LocalTransport())
    assert facts.problem == "no such interpreter: /nonexistent/python"
    assert "python" in (facts.fix or "")
    (tmp_path / "python").write_text("")
    facts = await probe(NodeConfig(name="a", python=str(tmp_path / "python"), workdir="/"), LocalTransport())
    assert "cannot be run" in (facts.problem or "")


async def test_a_host_key_that_nobody_accepted_comes_as_an_offer() -> None:
    unknown = HostKeyUnknown(
        "its host key is unknown", target="u@ultra", key="ssh-ed25519 AAAA", fingerprint="SHA256:x"
    )
    unknown.todo = "compare the fingerprint"
    facts = await probe(NodeConfig(name="a", ssh="u@ultra", python="/p", workdir="/"), Way(unknown))
    assert (facts.problem, facts.fix) == ("its host key is unknown", "compare the fingerprint")
    assert facts.host_key is not None
    assert (facts.host_key.target, facts.host_key.fingerprint) == ("u@ultra", "SHA256:x")


async def test_whatever_goes_wrong_on_one_node_the_others_answer() -> None:
    gone = NodeUnreachable("ultra did not answer", why="no answer on port 22", todo="is it on?")
    ways = Ways(a=Way(gone), b=Way(told(python="3.12.1")), c=Way(RuntimeError("a fault of our own\nwith more")))
    nodes = [NodeConfig(name=name, ssh=f"{name}.local", python="/p", workdir="/") for name in "abc"]
    a, b, c = await probe_all(config(*nodes), ways)
    assert (a.problem, a.fix) == ("ultra did not answer: no answer on port 22", "is it on?")
    assert (b.problem, b.python, b.round_trip_s) == (None, "3.12.1", 0.004)
    assert c.problem == "the probe failed: RuntimeError: a fault of our own with more"


async def test_nodes_come_as_they_answer_and_ranks_of_one_machine_are_asked_once(scripted: Script) -> None:
    slow = scripted("sleep 600")
    way = Way(told())
    nodes = [NodeConfig(name=name, ssh="ultra", python="/p", workdir="/") for name in ("r0", "r1")]
    answers = probing(config(slow, *nodes), Ways(ultra=LocalTransport(), r0=way, r1=way))
    assert [(await anext(answers)).node for _ in nodes] == ["r0", "r1"]
    assert way.runs == [["/p", "-", "/"]]
    await asyncio.wait_for(answers.aclose(), 10)


async def test_a_clock_that_is_off_is_measured() -> None:
    ahead = NOW + timedelta(seconds=90)
    facts = await probe(NodeConfig(name="a", python="/p", workdir="/"), Way(told(clock=ahead.timestamp())), lambda: NOW)
    assert facts.probed_at == NOW
    assert facts.clock_skew_s == pytest.approx(90.002)


async def test_an_mlx_that_crashes_on_import_costs_its_own_facts_only(tmp_path: Path) -> None:
    """The real script, with a module in mlx's place."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    facts = await probe(NodeConfig(name="a", python=str(python), workdir="/"), LocalTransport())
    assert (facts.problem, facts.gpu, facts.backends) == (None, None, ())
    assert facts.mlx_problem == "importing it ended with -11"
    assert facts.python and facts.mlx and facts.cores


def test_the_script_needs_nothing_but_the_standard_library_and_is_not_misled_by_the_home(tmp_path: Path) -> None:
    """With -S nothing else is installed, as on a node that has not been set up."""
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')\n")
    argv = [sys.executable, "-S", "-", str(tmp_path)]
    done = subprocess.run(argv, input=SCRIPT.read_bytes(), capture_output=True, cwd=tmp_path, check=True)
    assert done.stderr == b""
    said = json.loads(done.stdout)
    assert said["answers"]["versions"] == {"mlx": None, "mlx_lm": None}
    assert "wrong json" not in said.get("mlx_problem", "")


def test_what_hangs_is_named_and_a_command_is_killed_with_its_children(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    pids = tmp_path / "pids"
    (tools / "ip").write_text(f"#!/bin/sh\nsleep 600 &\necho $! $$ > {pids}\nwait\n")
    (tools / "ip").chmod(0o755)
    script = SCRIPT.read_text().replace("LIMIT_S = 4.0", "LIMIT_S = 2.0")
    script = script.replace("usage = shutil.disk_usage(directory)", "time.sleep(600)")
    done = subprocess.run(
        [sys.executable, "-", str(tmp_path)],
        input=script.replace("platform.system()", '"Linux"').encode(),
        capture_output=True,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["late"] == ["disk", "ip"]
    assert said["answers"]["versions"]
    for pid in map(int, pids.read_text().split()):
        until = time.monotonic() + 5
        while alive(pid):
            assert time.monotonic() < until, f"{pid} lives on"


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


async def test_an_answer_that_makes_no_sense_is_no_fact() -> None:
    odd = told(cores="many", python=["3"], clock="now", late=[1, "ip"], answers={"disk": "full", "ip": 5})
    facts = await probe(NodeConfig(name="a", python="/p", workdir="/"), Way(odd), lambda: NOW)
    assert facts == NodeFacts(
        node="a", host="127.0.0.1", probed_at=NOW, system="Linux", os="Linux", late=("ip",), round_trip_s=0.004
    )
