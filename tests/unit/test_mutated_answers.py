"""Whatever comes in place of an answer (cut, empty, late, failing, doubled, in another language, with other keys, types
or numbers) from a command that a node runs, or from the agent: nothing is raised but the reader's own errors, and what
could not be read is unknown, never "not there", "0", "off", "free" or "ended". The facts have a test of their own,
tests/unit/cluster/test_mutated_answers.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from engine.checks import doctor, health, hostfile
from engine.cluster import probe_results as results
from engine.cluster.agent_client import each_of, value_of
from engine.cluster.discovery import parse_find_python
from engine.cluster.facts import read_facts
from engine.cluster.host_connection import AttemptOnHost, HostConnection
from engine.cluster.probe_results import parse_output
from engine.cluster.telemetry import TelemetryParser
from engine.cluster.transport.base import Completed
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.models import CheckResult, CheckStatus, NodeFacts, NodeTelemetry
from engine.node import processes
from engine.node.probes import load, network, telemetry
from engine.plan.network import LaunchHost, NetworkPlan
from engine.protocol.attempt import ExitRecord, Identity, NodeFiles
from engine.protocol.events import ExitOutput
from engine.protocol.messages import (
    Decoder,
    Hello,
    Message,
    ProcessList,
    RankEnded,
    RankStarted,
    RequestEnded,
    encode,
)
from tests.checks.recorded import mac, studio
from tests.needs import RECORDINGS, require
from tests.unit.cluster.macs import NOW

Kind = TypeVar("Kind", bound=BaseModel)
require("recordings")


def recording(name: str) -> bytes:
    return (RECORDINGS / name).read_bytes()


NODE = NodeConfig(name="there", ssh="there", python=sys.executable, workdir="/")


@dataclass(frozen=True)
class Answer:
    """A command's answer."""

    output: bytes
    code: int = 0
    late: bool = False


# What may come in its place. What only says something else, well-formed and in time, nobody can tell from the truth.


def cut(chance: random.Random, answer: Answer) -> Answer:
    """By a signal, or by a pipe that broke within a line."""
    output = answer.output[: chance.randrange(len(answer.output) + 1)]
    return Answer(output, chance.choice([-9, -13, 0]) if output and not output.endswith(b"\n") else -9)


def empty(chance: random.Random, answer: Answer) -> Answer:
    return Answer(chance.choice([b"", b"\n", b"{}", b"[]", b"null", b"\0" * 10]), chance.choice([0, 1]))


def late(chance: random.Random, answer: Answer) -> Answer:
    return replace(cut(chance, answer), late=True)


def failing(chance: random.Random, answer: Answer) -> Answer:
    """It fails after a part of a good answer, or with words."""
    lines = answer.output.splitlines(keepends=True)
    part = b"".join(lines[: chance.randrange(len(lines) + 1)])
    words = chance.choice([b"Operation not permitted\n", b"\x1b[31mfehlgeschlagen: \xfc\n", part])
    return Answer(words, chance.choice([-9, 1, 64, 127, 255]))


def doubled(chance: random.Random, answer: Answer) -> Answer:
    return replace(answer, output=b"".join(line * 2 for line in answer.output.splitlines(keepends=True)))


WORDS = {b"Nov": "11月", b"Sat": "Sa", b"page size of": "Seitengröße", b"Pages": "Seiten", b"used": "belegt",
         b"Device": "Gerät", b"state": "Zustand", b"PORT": "ポート"}  # fmt: skip


def locale(chance: random.Random, answer: Answer) -> Answer:
    """Another language, in UTF-8 or in its own encoding."""
    output, encoding = answer.output, chance.choice(["utf-8", "latin-1", "shift-jis"])
    for word, other in WORDS.items():
        output = output.replace(word, other.encode(encoding, errors="replace"))
    return replace(answer, output=re.sub(rb"(\d)\.(\d)", rb"\1,\2", output))


def bytes_of_no_text(chance: random.Random, answer: Answer) -> Answer:
    at = chance.randrange(len(answer.output) + 1)
    return replace(answer, output=answer.output[:at] + b"\xff\xfe\x85\xc3" + answer.output[at:])


def renamed(chance: random.Random, answer: Answer) -> Answer:
    """A key has another name everywhere."""
    found = re.findall(rb'"([\w% ]+)"\s*[:=]|^\s*([\w.-]+):(?! flags)', answer.output, re.MULTILINE)
    keys = sorted({one or other for one, other in found})
    return replace(answer, output=answer.output.replace(chance.choice(keys), b"renamed")) if keys else answer


def without(chance: random.Random, answer: Answer) -> Answer:
    """A key of a document is missing at some depth, or a column of a table."""
    with contextlib.suppress(ValueError):
        document = json.loads(answer.output)
        places = [each for each in within(document) if isinstance(each, dict) and each]
        if places:
            place = chance.choice(places)
            del place[chance.choice(sorted(place))]
        return replace(answer, output=json.dumps(document).encode() + b"\n")
    if answer.output.count(b"\n") < 2:
        return cut(chance, answer)
    at = chance.randrange(4)
    rows = [line.split() for line in answer.output.splitlines()]
    return replace(answer, output=b"".join(b" ".join(row[:at] + row[at + 1 :]) + b"\n" for row in rows))


def retyped(chance: random.Random, answer: Answer) -> Answer:
    """A value of a document has another type."""
    with contextlib.suppress(ValueError):
        document = json.loads(answer.output)
        places = [each for each in within(document) if each and isinstance(each, (dict, list))]
        if places:
            place = chance.choice(places)
            key = chance.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            others: list[Any] = [["x"], {"a": 1}, "text", 7, True]
            place[key] = chance.choice([other for other in others if type(other) is not type(place[key])])
        return replace(answer, output=json.dumps(document).encode() + b"\n")
    return cut(chance, answer)


def other_numbers(chance: random.Random, answer: Answer) -> Answer:
    """One number is huge, negative or none."""
    numbers = list(re.finditer(rb"\d+(?:\.\d+)?", answer.output))
    if not numbers:
        return answer
    found = chance.choice(numbers)
    other = chance.choice([b"9" * 5_000, b"1e999", b"-1", b"NaN", b"-Infinity", b"9" * 25])
    return replace(answer, output=answer.output[: found.start()] + other + answer.output[found.end() :])


MUTATIONS = [
    cut,
    cut,
    empty,
    late,
    failing,
    doubled,
    locale,
    bytes_of_no_text,
    renamed,
    without,
    retyped,
    other_numbers,
]


def within(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from within(inner)


class Commands:
    """The tools of a Mac, as `processes` runs them. One whose name is not here is missing."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.answers = answers

    def run(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        words = [Path(command[0]).name, *command[1:]]
        known = (answer for name, answer in self.answers.items() if words[: len(name.split())] == name.split())
        answer = next(known, None)
        if answer is None:
            raise FileNotFoundError(2, "No such file or directory", command[0])
        if answer.late:
            raise subprocess.TimeoutExpired(command, 5.0)
        return subprocess.CompletedProcess(command, answer.code, answer.output, b"")


Claims = list[str]
Reader = Callable[[], Claims]
"""Asks the commands, and gives what is claimed wrongly."""
READERS: dict[str, tuple[dict[str, Answer], Reader]] = {}


def reads(answers: Mapping[str, str | bytes]) -> Callable[[Reader], Reader]:
    """The true answers, by the beginnings of the commands."""
    known = {name: Answer(text if isinstance(text, bytes) else text.encode()) for name, text in answers.items()}

    def add(reader: Reader) -> Reader:
        READERS[reader.__name__] = known, reader
        return reader

    return add


START = "Sat Nov 21 10:00:01 2026"
NONCE = "0123456789abcdef"
SPEC = "/Users/ana/.flightdeck/runs/r-1/attempts/2/spec.json"
ALIVE = os.getppid()
"""A process that lives, of which the answers tell."""
HIDDEN = 4_100_001
"""A program of Apple's, whose environment nobody sees: a child of it."""
OWN = os.getpid()
MARKED = f"HOME=/Users/ana FLIGHTDECK_NONCE={NONCE} MLX_RANK=1 FLIGHTDECK_SPEC={SPEC} SHELL=/bin/zsh"
ENVIRONMENTS = (
    f"    1 Ss   /sbin/launchd\n{ALIVE:5} S+   /opt/python -m engine.node.keeper {MARKED}\n"
    f"{HIDDEN:5} S    /bin/bash train.sh\n{OWN:5} S    python -m engine.node.agent HOME=/Users/ana\n"
)
TREE = "".join(
    f"{pid:5} {parent:5} {state} {rss:8} {used} {START}\n"
    for pid, parent, state, rss, used in (
        *((1, 0, "Ss", 1024, "12:01:35.00"), (ALIVE, 1, "S+", 1048576, "12:01:35.00")),
        *((HIDDEN, ALIVE, "S", 1024, "0:00.01"), (OWN, 1, "S", 20480, "1:35.69")),
    )
)
BOOT = "6D1C1A6C-9E1B-4A39-9B31-0D1C2F1D6A11"
UNKNOWN = (OSError, ValueError, subprocess.SubprocessError)
"""The probes' own errors: the agent reports them, and each is a reason why nothing is known."""


@reads({"ps": f"S    {START}\n", "sysctl": f"{BOOT}\n"})
def identity() -> Claims:
    """A process that lives, on a machine that was not restarted."""
    claims = [] if processes.alive(ALIVE, START) else ["it has ended"]
    return claims + ([] if processes.same_boot(BOOT, processes.boot_id()) else ["restarted"])


@reads({"ps -axEww": ENVIRONMENTS, "ps -ax": TREE, "ps -o": f"S    {START}\n", "ps -ww": "/bin/bash train.sh\n"})
def proof_of_end() -> Claims:
    with contextlib.suppress(*UNKNOWN):
        found = {each.pid for each in processes.with_family(processes.with_nonce(NONCE), {ALIVE: START})}
        return [f"{pid} has ended" for pid in (ALIVE, HIDDEN) if pid not in found]
    return []


LISTENER = socket.create_server(("127.0.0.1", 0))


@reads({"lsof": f"p{ALIVE}\nf5\n", "ps -axEww": ENVIRONMENTS, "ps -ww": "/opt/python -m engine.node.keeper\n"})
def port_holder() -> Claims:
    report = network.probe_ports(f"127.0.0.1:{LISTENER.getsockname()[1]}")
    (holder,) = parsed(report, results.PortHolders).ports
    if holder is None:
        return ["free"]
    return [] if holder.pid in (None, ALIVE) else [f"held by {holder.pid}"]


@reads({
    "ps -axww": f"    1   0.0    20480 12-04:00:01 /sbin/launchd\n  501  98.7 93206736    02:11:40 ollama serve\n"
    f"{OWN:5}  10.0    20480       00:04 python\n",
    "ps -axEww": ENVIRONMENTS,
    "sysctl -n hw.memsize": f"{128 * 2**30}\n",
    "ioreg": '    {\n      "PerformanceStatistics" = {"Device Utilization %"=93,"Renderer Utilization %"=90}\n    }\n',
    "pmset": "Assertion status system-wide:\n   PreventSystemSleep             0\n   PreventUserIdleSystemSleep     1\n"
    "Listed by owning process:\n",
})  # fmt: skip
def other_load() -> Claims:
    seen: results.SystemLoad | FlightDeckError
    try:
        seen = parsed(load.probe_load(), results.SystemLoad)
    except (*UNKNOWN, FlightDeckError) as error:
        seen = FlightDeckError("the load probe ended with 1", why=str(error))
    found = health.evaluate(studio("ultra"), {"ultra": mac()}, {"ultra": (0.004, 0.0)}, {"ultra": seen})
    text = " ".join((found.summary, *found.evidence.values()))
    return [claim for claim in ("no other process", "sleep may come", "GPU 0%", "GPU 9% busy") if claim in text]


TELEMETRY: dict[str, str | bytes] = {
    "ps -ax": TREE,
    "ps -Eww": ENVIRONMENTS,
    "vm_stat": recording("vm_stat__real-16gb.txt"),
    "sysctl": recording("sysctl-vm.swapusage__machealth.txt"),
    "ioreg": '      "PerformanceStatistics" = {"Device Utilization %"=93,"Renderer Utilization %"=90}\n',
    "notifyutil": "com.apple.system.thermalpressurelevel 2\n",
}


@reads(TELEMETRY)
def telemetry_of_tools() -> Claims:
    sample = {"system": "Darwin"} | telemetry.Ranks().read() | telemetry.Mac(2.0).tools() | telemetry.thermal()
    return wrong_values(TelemetryParser().read(json.dumps(sample).encode()), "tools")


@reads({"macmon": recording("macmon-pipe__asimon-m1max-v08.txt").splitlines()[0] + b"\n"})
def telemetry_of_macmon() -> Claims:
    sample = {"system": "Darwin", "macmon": processes.tool_output("macmon").partition("\n")[0]}
    return wrong_values(TelemetryParser().read(json.dumps(sample).encode()), "macmon")


TRUE: dict[str, dict[str, Any]] = {}
"""What was read from the true answers."""


def wrong_values(values: dict[str, Any] | None, name: str) -> Claims:
    assert values is not None
    sample = NodeTelemetry(node="there", at=NOW, **values).model_dump(exclude={"node", "at"})
    true = TRUE.setdefault(name, sample)
    # macmon's other keys stand in for one that is missing.
    same = [key for key in true if sample[key] in (None, (), true[key]) or (name == "macmon" and sample[key])]
    return [f"{key} is {sample[key]}" for key in true if key not in same]


def parsed(document: Any, kind: type[Kind]) -> Kind:
    """As the head takes it from the agent. Raises LaunchError."""
    done = Completed(0, json.dumps(document).encode() + b"\n", b"")
    return value_of(parse_output("the probe", done, kind, after_s=1.0), NODE)


SHA = "ab" * 32
REPORTS: dict[type[BaseModel], Any] = {
    results.ModelFiles: {"kind": "llama", "bytes": 10**9, "shards": 2, "faults": ["no shard"], "hashes": {"a": SHA}},
    results.JsonlSummaries: {
        "files": [
            {"lines": 9, "examples": 8, "sha256": SHA, "form": "chat", "faults": [[3, "is no JSON"]], "fault_count": 1},
            {"problem": "it is missing", "absent": True},
            {"problem": "it is gzip", "foreign": "gzip", "tally": {"rows": [8, 1], "weight": [2, 3]}},
        ]
    },
    results.TemplateReport: {"refused": [{"file": "train.jsonl", "line": 3, "count": 2, "why": "roles"}]},
    results.AdapterReport: {"names": ["q_proj"], "trained": 12},
    results.Reporters: {"services": {"wandb": {"installed": True, "key": True}}},
    results.ProgramLocation: {"program": None, "fault": "workdir is not there", "make": "/a"},
    results.PortHolders: {"ports": [{"holder": "pid 12 (python)", "pid": 12, "orphan": True}]},
    results.AddressProblems: {"problems": ["no address of this machine"]},
    results.ListeningPorts: {"listening": [29_500]},
    results.StaleProcesses: {"stale": [{"pids": [12], "command": "python"}], "marked_seen": True},
    results.LeaseReleased: {"left": ["python"]},
    results.WorkdirTree: {"entries": {"train.py": [12, SHA]}, "left": [".venv"]},
    results.FileHashes: {"hashes": {"job": SHA}},
    results.ModelConfiguration: {"configuration": {"model_type": "llama"}, "dtype": "bfloat16"},
    results.ExampleCount: {"examples": 900},
    results.SystemLoad: {
        "processes": [{"pid": 12, "command": "ollama", "cores": 3.2, "rss_bytes": 2**30}],
        "memory_bytes": 2**37, "ioreg": "x", "assertions": "y", "caffeinate": True,
        "energy": "x",
    },
    results.CheckpointStorage: {
        "directory": "/a", "fault": "no space", "not_durable": "/a", "free": 10**9, "damaged": [["a", "it is cut"]],
        "resume": {"kind": "lora", "ranks": [8], "layers": [1], "modules": ["q"]}, "resume_fault": "cut", "largest": [],
    },
    results.FreePorts: {"free": [20_000]},
    results.NodeCopies: {"cache": "/a", "free_bytes": 10**9, "copies": [
        {"kind": "model", "name": "org/tiny", "revision": SHA, "path": "/a/b", "bytes": 9, "files": 2, "missing": ["c"],
         "damaged": ["d"]},
    ]},
    results.RemovedCopy: {"bytes": 10**9},
    results.WriteReport: {"problem": "no space left"},
    results.PackagesReport: {
        "python": "3.12.4", "linux": False, "venv": True, "versions": {"mlx": "0.32.4"}, "errors": {"torch": "none"},
        "backends": ["ring"],
    },
}  # fmt: skip
HINTS = {
    "absent",
    "make",
    "orphan",
    "pid",
    "venv",
    "dtype",
    "largest",
    "caffeinate",
    "ioreg",
    "assertions",
    "free",
    "energy",
    "schedule",
    "updates",
}
"""Their want claims nothing: a fix that is not offered, or None for not known."""
KEYS = {"hashes", "services", "entries", "configuration", "versions", "errors"}
"""Their keys are names of the node's own, and not the protocol's."""


@reads({f"probe {kind.__name__}": json.dumps(document) + "\n" for kind, document in REPORTS.items()})
def reports_of_probes() -> Claims:
    claims = []
    for kind, true in REPORTS.items():
        try:
            code, output = processes.run_tool("probe", kind.__name__)
            done = Completed(code, output.encode(), b"")
            value = value_of(parse_output("the probe", done, kind, after_s=1.0), NODE)
        except (*UNKNOWN, FlightDeckError):
            continue
        claims += [f"{kind.__name__}{path}" for path in lost(parsed(true, kind).model_dump(), value.model_dump())]
    return claims


def lost(true: Any, found: Any, path: str = "") -> Iterator[str]:
    """Where something was, and is now none, nothing or 0. Lists of another length are each_of's to refuse."""
    if path.rpartition(".")[2] in KEYS and isinstance(found, dict):
        return
    if true and not found:
        yield path
    elif isinstance(true, dict) and isinstance(found, dict):
        for key in true.keys() - HINTS:
            yield from lost(true[key], found.get(key), f"{path}.{key}")
    elif isinstance(true, list) and isinstance(found, list) and len(true) == len(found):
        for one, other in zip(true, found, strict=True):
            yield from lost(one, other, f"{path}[]")


IDENTITY = Identity(0, "r-1", 1, NONCE, "boot", 700, START, 701, 701, START, 1e9)
FRAMES: list[Message] = [
    Hello("boot", 0, 1e9),
    RankStarted(0, IDENTITY),
    ProcessList(1, [(701, "python")], {"rank0.log": 12}),
    RankEnded(1, ExitRecord(1, 1, 0, None, 1e9, 12), 0, ExitOutput(log="40/40")),
    RequestEnded(1, 0, ""),
]


@reads({"frames": b"".join(encode(frame) for frame in FRAMES)})
def messages_of_the_agent() -> Claims:
    """AgentSession ends the connection for these errors, and says why."""
    there = AttemptOnHost(NodeFiles(Path("/a")), NONCE, {0: "there", 1: "there"})
    connection = HostConnection(NODE, LocalTransport(), there)
    connection.request_processes(kill=False)
    with contextlib.suppress(*UNKNOWN, KeyError, TypeError):
        for message in Decoder().feed(subprocess.run(["frames"], check=False).stdout):
            connection._take(message)
    first, second = connection.observe(0), connection.observe(1)
    claims = ["nothing is left"] if connection.processes() == [] else []
    claims += ["rank 0 has ended"] if first.record or first.vanished or first.restarted else []
    return claims + (["rank 1 has vanished"] if second.vanished else [])


PYTHONS = ("~/mlx/.venv/bin/python", "/Users/ana/mlx/.venv/bin/python")
PLANNED = NetworkPlan(backend="ring", hosts=(LaunchHost(ssh="a", ips=("10.0.0.1",)),))
INIT = (
    "Welcome!\nflightdeck-init\thome\t/Users/ana\nflightdeck-init\tsystem\tDarwin\nflightdeck-init\thostname\tmax\n"
    "flightdeck-init\twithout\t/usr/bin/python3\nflightdeck-init\tpython\t/Users/ana/mlx/.venv/bin/python\n"
    "flightdeck-init\tversions\t3.12.4 0.32.4 0.32.2\n"
)


@reads({
    "ibv_devices": recording("ibv_devices__mlxdocs-m3ultra-6dev.txt"),
    "backends": "gpu ring jaccl\n",
    "hostfile": json.dumps([[0, "a", ["10.0.0.1"], []]]) + "\n",
    "init": INIT,
})  # fmt: skip
def programs_of_the_head() -> Claims:
    rdma, backends, _ = asyncio.run(examine())
    claims = ["no devices"] if "no devices" in rdma.summary or rdma.status is CheckStatus.SKIP else []
    claims += ["no ring"] if backends.status is CheckStatus.FAIL and "distributed" in backends.summary else []
    found = parse_find_python(completed("init"))
    claims += ["no python"] if "was found" in found.problem else []
    return claims + ([found.python] if found.python not in (None, *PYTHONS) else [])


async def examine() -> tuple[CheckResult, CheckResult, str | None]:
    return await doctor._rdma(), await doctor._backends(), await hostfile._parse_problem(PLANNED)


def completed(name: str) -> Completed:
    try:
        done = subprocess.run([name], check=False)
    except subprocess.TimeoutExpired:
        return Completed(None, b"", b"")
    return Completed(done.returncode, done.stdout, b"")


async def run_here(_: LocalTransport, argv: Sequence[str], *, timeout_s: float) -> Completed:
    del timeout_s
    names = {doctor._LIST_BACKENDS: "backends", hostfile._PARSE_HOSTFILE: "hostfile"}
    return completed(names[argv[2]] if len(argv) > 2 else "ibv_devices")


RECORDED = {
    "sw_vers": "sw_vers__id52553259708-26.4.1.txt",
    "vm_stat": "vm_stat__real-16gb.txt",
    "sysctl": "sysctl-hw.model-hw.memsize-iogpu__validationlog-m2pro-mini.txt",
    "profile": "system_profiler-SPDisplaysDataType-json__joulewise-m3max-headless.txt",
    "thunderbolt": "system_profiler-SPThunderboltDataType-json__omlx-m3ultra-studio.txt",
    "networksetup": "networksetup-listallhardwareports__osaurus-m5max-macos27.txt",
    "ifconfig": "ifconfig__blog-m4mini-bridge0.txt",
    "ibv_devices": "ibv_devices__mlxdocs-m3ultra-6dev.txt",
    "ibv_devinfo": "ibv_devinfo__linkfixtures-6dev-en7-active-MODELLED.txt",
    "rdma_ctl": "rdma_ctl-status__monitor-research-enabled.txt",
    "pmset_therm": "pmset-g-therm__machealth-throttled-INTEL.txt",
}
WITHOUT_BUILD = "macOS 26.4.1"
LISTS = {"interfaces": "ifconfig networksetup", "rdma_devices": "ibv_devices ibv_devinfo"}
UNSCALAR = {*LISTS, "thunderbolt"}
"""Whose cables are compared in tests/unit/cluster: a Mac that lacks one is contradicted by the other end."""


@reads({name: recording(file) for name, file in RECORDED.items()})
def recorded_facts() -> Claims:
    """Each value is the true one or None; a list that lacks something is one that is not known."""
    answers, unknown = {}, {}
    for name in RECORDED:
        try:
            code, answers[name] = processes.run_tool(name)
        except subprocess.TimeoutExpired:
            unknown[name] = {"command": name, "late_s": 4.0}
        else:
            unknown |= {name: {"command": name, "exit_code": code, "stderr": ""}} if code else {}
    report = json.loads(json.dumps({"system": "Darwin", "answers": answers, "unknown": unknown}))
    fact = NodeFacts(node="there", host="there", probed_at=NOW, **read_facts(report))
    found = fact.model_dump(exclude={"unknown"})
    true = TRUE.setdefault("facts", found)
    wrong = [key for key in true.keys() - UNSCALAR if found[key] not in (None, true[key], WITHOUT_BUILD)]
    claims = [f"{key} is {found[key]}" for key in wrong]
    for key, commands in LISTS.items():
        names = [{each["name"] for each in facts[key] if each.get("ipv4", True)} for facts in (true, found)]
        if not names[0] <= names[1] and not {*commands.split()} & fact.unknown.keys():
            claims.append(f"{key} lacks {names[0] - names[1]}")
    return claims


def claims(seed: int, commands: Commands) -> tuple[str, Claims]:
    """The mutations, and what is claimed though nobody could know it."""
    chance = random.Random(seed)
    name = sorted(READERS)[seed % len(READERS)]
    known, reader = READERS[name]
    commands.answers = answers = dict(known)
    chosen = chance.sample(sorted(known), min(len(known), chance.choice([1, 1, 1, 2, 4])))
    mutations = [chance.choice(MUTATIONS) for _ in chosen]
    for command, mutation in zip(chosen, mutations, strict=True):
        answers[command] = mutation(chance, answers[command])
    done = ", ".join(f"{mutation.__name__} {command}" for command, mutation in zip(chosen, mutations, strict=True))
    found = reader()
    # These may make what is well-formed and untrue, which nobody can tell from the truth.
    return f"{name}: {done}", [] if {other_numbers, retyped} & {*mutations} else found


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """This machine is a Mac, whose commands give these answers."""
    commands = Commands({})
    monkeypatch.setattr(subprocess, "run", commands.run)
    for module in (processes, network, load):
        monkeypatch.setattr(module, "_LINUX", False)
    monkeypatch.setattr(LocalTransport, "run", run_here)
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "macmon" else name)
    # The true answers first: what is read from them is what the others are compared with.
    for name, (answers, reader) in sorted(READERS.items()):
        commands.answers = answers
        assert reader() == [], name
    assert TRUE["tools"]["ranks"] and TRUE["tools"]["thermal"] == "heavy" and TRUE["facts"]["memory_total_bytes"]
    return commands


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_answers_are_read_and_no_absence_is_claimed(commands: Commands, count: int) -> None:
    wrong = {seed: found for seed in range(count) if (found := claims(seed, commands))[1]}
    assert not wrong, (len(wrong), list(wrong.values())[:12])


def test_answers_are_as_many_as_the_questions() -> None:
    with pytest.raises(LaunchError, match="1 answers came to 2 questions"):
        each_of([None], ["a", "b"], NODE)


def test_a_file_of_which_nothing_says_whether_it_is_of_another_format_is_not_known_to_be_none(
    commands: Commands,
) -> None:
    assert claims(4447, commands) == (
        "reports_of_probes: bytes_of_no_text probe CheckpointStorage, renamed probe JsonlSummaries",
        [],
    )
