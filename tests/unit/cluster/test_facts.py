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
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.agent_client import AgentClient
from engine.cluster.facts import probe, probe_all, probe_as_completed, read_facts
from engine.cluster.transport.local import LocalTransport
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import HostKeyUnknown, NodeUnreachable
from engine.models import Failed, Late, NodeFacts, Unparsable
from tests.agent import keeper_runner
from tests.needs import TORCH
from tests.unit.cluster.fake_agent import FakeFleet, FakeNode
from tests.unit.cluster.macs import mesh
from tui.node_state import warnings

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


def config(*nodes: NodeConfig) -> Config:
    return Config(cluster=ClusterConfig(), nodes=nodes, job=JobConfig(name="job", command=("true",)))


def report(**fields: object) -> dict[str, object]:
    """What the probe prints."""
    return {"system": "Linux", "answers": {}, **fields}


async def facts_of(node: NodeConfig, transport: LocalTransport | None = None, **options: Any) -> NodeFacts:
    agent = AgentClient(node, transport or LocalTransport())
    try:
        return await probe(node, agent, **options)
    finally:
        await agent.aclose()


async def test_this_machine(tmp_path: Path) -> None:
    began = time.monotonic()
    node = NodeConfig(name="here", python=sys.executable, workdir=str(tmp_path / "not" / "yet"))
    facts = await facts_of(node)
    assert time.monotonic() - began < 60
    assert (facts.node, facts.host, facts.problem, facts.unknown) == ("here", "127.0.0.1", None, {})
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
    assert facts.clock_skew_s is not None and abs(facts.clock_skew_s) < 10
    assert any(address.startswith("127.0.0.1/") for port in facts.interfaces for address in port.ipv4)
    if sys.platform == "linux":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert facts.memory_total_bytes == pytest.approx(pages, rel=0.01)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "echo 'dyld: Library not loaded' >&2; exit 134",
            "PYTHON gave no answer: it ended with 134: dyld: Library not loaded",
        ),
        ("exit 0", "PYTHON gave no answer: it ended with 0"),
        ("printf '\\033]0;owned\\007gone\\n' >&2; exit 1", "PYTHON gave no answer: it ended with 1: gone"),
        ("echo '[1, 2]'; echo nonsense; exit 0", "PYTHON gave no answer: it ended with 0"),
        ("exec sh -c /nowhere/python 2>/dev/null", "no such interpreter: PYTHON"),
    ],
)
async def test_an_interpreter_that_fails_is_a_problem_in_one_line(scripted: Script, body: str, problem: str) -> None:
    node = scripted(body)
    facts = await facts_of(node)
    assert facts.problem == problem.replace("PYTHON", node.python)
    assert [facts.python, facts.mlx, facts.cores] == [None] * 3


async def test_an_interpreter_that_hangs_is_given_up(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cluster.facts.TIME_LIMIT_S", -2.5)
    monkeypatch.setattr("engine.cluster.transport.local._LEAVES_S", 0.1)
    facts = await facts_of(scripted("sleep 600"))
    assert "within 0.5 s" in (facts.problem or "")


async def test_an_interpreter_that_is_not_there_or_is_no_program_is_named(tmp_path: Path) -> None:
    facts = await facts_of(NodeConfig(name="a", python="/nonexistent/python", workdir="/"))
    assert facts.problem == "no such interpreter: /nonexistent/python"
    assert "python" in (facts.fix or "")
    (tmp_path / "python").write_text("")
    facts = await facts_of(NodeConfig(name="a", python=str(tmp_path / "python"), workdir="/"))
    assert "cannot be run" in (facts.problem or "")


async def test_a_host_key_that_nobody_accepted_comes_as_an_offer() -> None:
    unknown = HostKeyUnknown(
        "its host key is unknown", target="u@ultra", key="ssh-ed25519 AAAA", fingerprint="SHA256:x"
    )
    unknown.todo = "compare the fingerprint"
    facts = await facts_of(NodeConfig(name="a", ssh="u@ultra", python="/p", workdir="/"), FakeNode(unknown))
    assert (facts.problem, facts.fix) == ("its host key is unknown", "compare the fingerprint")
    assert facts.host_key is not None
    assert (facts.host_key.target, facts.host_key.fingerprint) == ("u@ultra", "SHA256:x")


async def test_whatever_goes_wrong_on_one_node_the_others_answer() -> None:
    gone = NodeUnreachable("ultra did not answer", why="no answer on port 22", todo="is it on?")
    fault = RuntimeError("a fault of our own\nwith more")
    nodes = [NodeConfig(name=name, ssh=name, python="/p", workdir="/") for name in "abc"]
    async with FakeFleet(a=FakeNode(gone), b=FakeNode(report(python="3.12.1")), c=FakeNode(fault)) as fleet:
        a, b, c = await probe_all(config(*nodes), fleet)
    assert (a.problem, a.fix) == ("ultra did not answer: no answer on port 22", "is it on?")
    assert (b.problem, b.python) == (None, "3.12.1")
    assert b.round_trip_s is not None and 0 < b.round_trip_s < 20
    assert c.problem == "the probe failed: RuntimeError: a fault of our own with more"


async def test_nodes_come_as_they_answer_and_ranks_of_one_machine_are_asked_once(
    scripted: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cluster.transport.local._LEAVES_S", 0.1)
    slow = scripted("sleep 600")
    ultra = FakeNode(report())
    nodes = [NodeConfig(name=name, ssh="ultra", python="/p", workdir="/") for name in ("r0", "r1")]
    async with FakeFleet(ultra=ultra) as fleet:
        answers = probe_as_completed(config(slow, *nodes), fleet)
        assert [(await anext(answers)).node for _ in nodes] == ["r0", "r1"]
        assert [(request.probe, request.arguments) for request in ultra.probes] == [("facts", ["/"])]
        await asyncio.wait_for(answers.aclose(), 10)


async def test_a_clock_that_is_off_is_measured() -> None:
    ahead = NOW + timedelta(seconds=90)
    node = FakeNode(report(clock=ahead.timestamp()))
    facts = await facts_of(NodeConfig(name="a", ssh="a", python="/p", workdir="/"), node, clock=lambda: NOW)
    assert facts.probed_at == NOW
    assert facts.round_trip_s is not None
    assert facts.clock_skew_s == pytest.approx(90 + facts.round_trip_s / 2)


async def test_an_mlx_that_crashes_on_import_costs_its_own_facts_only(tmp_path: Path) -> None:
    """The real probe, with a module in mlx's place."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    facts = await facts_of(NodeConfig(name="a", python=str(python), workdir="/"))
    assert (facts.problem, facts.gpu, facts.backends) == (None, None, ())
    assert facts.mlx_problem == "importing it ended with -11"
    assert facts.unknown["mlx_import"] == Failed(command="import mlx", exit_code=-11)
    assert facts.python and facts.mlx and facts.cores


@pytest.mark.needs("torch")
async def test_a_node_of_a_pytorch_job_is_asked_for_torch_and_lacks_no_mlx() -> None:
    node = NodeConfig(name="a", python=str(TORCH), workdir="/")
    facts, as_for_mlx = await facts_of(node, framework="torch"), await facts_of(node)
    assert facts.torch is not None and "mlx_import" not in facts.unknown
    assert [line for line in warnings(facts, {}) if "mlx" in line] == []
    assert [line for line in warnings(as_for_mlx, {}) if "mlx cannot be imported" in line]


def test_the_probe_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """With -S nothing else is installed, as on a node that has not been set up."""
    argv = [sys.executable, "-S", "-m", "engine.node.probes", "facts", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, cwd=keeper_runner.stage_bundle(tmp_path / "bundle"), check=True)
    assert done.stderr == b""
    assert set(json.loads(done.stdout)["answers"]["versions"].values()) == {None}


@pytest.mark.needs("ps")
def test_what_hangs_or_fails_is_reported_with_its_command_and_killed_with_its_children(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    pids = tmp_path / "pids"
    (tools / "ip").write_text(f"#!/bin/sh\nsleep 600 &\necho $! $$ > {pids}\nwait\n")
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho no driver >&2\nexit 9\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    program = """
import json, os, sys, time
from engine.node.probes import facts
facts.LIMIT_S = 3.0
facts.Query.__init__.__defaults__ = (3.0,)
name = os.uname()
os.uname = lambda: os.uname_result(("Linux", *name[1:]))
facts.disk = lambda directory: time.sleep(600)
print(json.dumps(facts.probe_facts(sys.argv[1])), flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["unknown"].pop("nvidia_smi") == {
        "command": "nvidia-smi --query-gpu=name,memory.total,uuid,driver_version --format=csv,noheader,nounits",
        "exit_code": 9,
        "stderr": "no driver\n",
    }
    assert found["unknown"].pop("nvidia_smi_more")["exit_code"] == found["unknown"].pop("nvidia_smi_table")["exit_code"]
    assert found["unknown"] == {
        "disk": {"command": "disk", "late_s": 3.0},
        "ip": {"command": "ip -j addr", "late_s": 3.0},
    }
    assert found["answers"]["versions"]
    for pid in map(int, pids.read_text().split()):
        until = time.monotonic() + 30
        while alive(pid):
            assert time.monotonic() < until, f"{pid} lives on"


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


async def test_an_answer_that_makes_no_sense_is_no_fact() -> None:
    odd = report(
        cores="many",
        python=["3"],
        clock="now",
        unknown={"ip": {"command": ["ip"], "late_s": 4}, "disk": 3, "user": {"late_s": "long"}},
        answers={"disk": "full", "ip": 5},
    )
    facts = await facts_of(NodeConfig(name="a", python="/p", workdir="/"), FakeNode(odd), clock=lambda: NOW)
    late = Late(command="['ip']", after_s=4)
    assert facts == NodeFacts(
        node="a", host="127.0.0.1", probed_at=NOW, system="Linux", os="Linux", unknown={"ip": late}
    )


def mac_facts(answers: dict[str, str], unknown: dict[str, dict[str, object]]) -> NodeFacts:
    """Facts of the first Mac of a mesh of two, of which some commands ended otherwise."""
    fields = read_facts(report(system="Darwin", answers=mesh(2).answers(0) | answers, unknown=unknown))
    return NodeFacts(node="mac0", host="mac0", probed_at=NOW, **fields)


@pytest.mark.parametrize(
    ("name", "entry", "output", "reason"),
    [
        ("thunderbolt", {"late_s": 4.0}, "", "gave no answer within 4 s"),
        ("thunderbolt", {"exit_code": 1, "stderr": "a\nno such type\n"}, "", "ended with 1: no such type"),
        ("ifconfig", {"late_s": 4.0}, "", "gave no answer within 4 s"),
        ("ifconfig", {"exit_code": -9, "stderr": ""}, "", "ended with -9"),
    ],
)
def test_a_command_that_is_late_or_fails_leaves_its_facts_unknown(
    name: str, entry: dict[str, object], output: str, reason: str
) -> None:
    facts = mac_facts({name: output}, {name: {"command": "the command", **entry}})
    assert str(facts.unknown[name]) == f"the command {reason}"
    again = NodeFacts.model_validate_json(facts.model_dump_json())
    assert again == facts, "the reason is kept in the store"


@pytest.mark.parametrize("output", ["", "Segmentation fault", '{"SPThunderboltDataType": 7}', "[1, 2"])
def test_a_report_that_is_cut_is_not_read_as_no_cable(output: str) -> None:
    facts = mac_facts({"thunderbolt": output}, {})
    assert isinstance(facts.unknown["thunderbolt"], Unparsable)
    assert facts.unknown["thunderbolt"].command == "system_profiler SPThunderboltDataType -json"


def test_a_command_that_fails_and_prints_all_the_same_is_known() -> None:
    facts = mac_facts({}, {"sysctl": {"command": "sysctl", "exit_code": 1, "stderr": "unknown oid"}})
    assert facts.unknown == {} and facts.memory_total_bytes


def test_a_mac_without_rdma_tools_has_none_and_nothing_is_unknown() -> None:
    answers = mesh(2).answers(0)
    for name in ("ibv_devices", "ibv_devinfo", "rdma_ctl"):
        answers.pop(name, None)
    fields = read_facts(report(system="Darwin", answers=answers))
    assert (fields["rdma_devices"], fields["rdma_enabled"], fields["unknown"]) == ((), None, {})
