"""What the probes report of a GPU, beside nvidia-smi's XML, PyTorch, and a process whose memory and work are known."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final
from xml.etree import ElementTree

from engine.cluster.telemetry import TelemetryParser
from engine.node.probes.facts import LINUX_COMMANDS
from engine.node.probes.telemetry import NVIDIA_FIELDS
from tests.gpu.head import flightdeck, gpu_used_mib, write_config
from tests.gpu.part import ROOT, Visit

ALLOCATED: Final = 2 << 30
"""Bytes that the process holds on the GPU."""
CONTEXT: Final = 3 << 29
"""Bytes that CUDA's context and PyTorch's libraries may take beside it."""
_PROBES: Final = (sys.executable, "-m", "engine.node.probes")
_COMPUTE_APPS: Final = ("--query-compute-apps=pid,used_memory,process_name", "--format=csv,noheader,nounits")
_PROCESS: Final = """
import json, os, sys, torch
device, size = sys.argv[1], int(sys.argv[2])
held = torch.zeros(size, dtype=torch.uint8, device=device)
found = {"pid": os.getpid()}
if device == "cuda":
    properties = torch.cuda.get_device_properties(0)
    found |= {"name": properties.name, "memory": properties.total_memory, "uuid": str(getattr(properties, "uuid", "")),
              "capability": f"{properties.major}.{properties.minor}", "allocated": torch.cuda.memory_allocated()}
print(json.dumps(found), flush=True)
sys.stdin.readline()
matrix = torch.randn(2048 if device == "cuda" else 512, 2048 if device == "cuda" else 512, device=device)
while True:
    matrix = (matrix @ matrix).clamp(-1, 1)
    if device == "cuda":
        torch.cuda.synchronize()
"""


class Lines:
    """A program's lines of output, with a limit for each."""

    def __init__(self, argv: list[str], env: Mapping[str, str] | None = None) -> None:
        environment = {**os.environ, **(env or {})}
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT)
        self._rest = b""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:
            pass

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def next(self, limit_s: float) -> bytes:
        """Raises TimeoutError; EOFError where the program has ended."""
        stream, deadline = self.process.stdout, time.monotonic() + limit_s
        assert stream is not None
        while b"\n" not in self._rest:
            if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no line within {limit_s:g} s")
            read = os.read(stream.fileno(), 65_536)
            if not read:
                raise EOFError("the program has ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def facts(visit: Visit) -> None:
    config = write_config(visit, "facts", 1, job={"framework": "torch", "command": ["python", "train.py"]})
    done = flightdeck(visit, "nodes", "-c", str(config), "--accept", "--json")
    (found,) = json.loads(done.output)["nodes"]
    if visit.dry:
        _machine_facts(visit, found)
    else:
        _record_queries(visit)
        _gpu_facts(visit, found)
    _telemetry(visit, found)


def _record_queries(visit: Visit) -> None:
    """Every question that the engine asks nvidia-smi, and its answer word for word."""
    queries = [argv for name, argv in LINUX_COMMANDS.items() if name.startswith("nvidia_smi")]
    queries += [["nvidia-smi", f"--query-gpu={NVIDIA_FIELDS}", "--format=csv,noheader,nounits"]]
    queries += [
        ["nvidia-smi", *_COMPUTE_APPS],
        ["nvidia-smi", "-L"],
        ["nvidia-smi", "-q"],
        ["nvidia-smi", "topo", "-m"],
    ]
    for argv in queries:
        done = visit.call(argv, limit_s=15.0)
        visit.record(" ".join(argv), f"exit code {done.code}\n{done.output}{done.errors}")


def _equal(visit: Visit, name: str, reported: object, true: object) -> None:
    visit.result(f"facts: {name}", str(reported), target=str(true), ok=str(reported) == str(true))


def _machine_facts(visit: Visit, found: Mapping[str, Any]) -> None:
    """The CPU twin: what the facts probe reports of this machine, against the system's own files."""
    kilobytes = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    _equal(visit, "memory, bytes", found["memory_total_bytes"], int(kilobytes[1]) * 1024 if kilobytes else None)
    _equal(visit, "cores", found["cores"], len(os.sched_getaffinity(0)))
    version = visit.call(
        [visit.python, "-c", "import importlib.metadata as m; print(m.version('torch'))"]
    ).output.strip()
    _equal(visit, "torch", found["torch"], version)
    _equal(visit, "GPUs", found["gpus"], [])


def _gpu_facts(visit: Visit, found: Mapping[str, Any]) -> None:
    """Against nvidia-smi's XML, which the engine does not read."""
    text = visit.call(["nvidia-smi", "-q", "-x"], limit_s=15.0).output
    visit.record("nvidia-smi -q -x", text)
    tree = ElementTree.fromstring(text)
    gpus = tree.findall("gpu")
    _equal(visit, "GPUs", len(found["gpus"]), len(gpus))
    _equal(visit, "driver", found["nvidia_driver"], tree.findtext("driver_version"))
    _equal(visit, "CUDA of the driver", found["cuda"], tree.findtext("cuda_version"))
    for reported, gpu in zip(found["gpus"], gpus, strict=False):
        _equal(visit, "name", reported["name"], gpu.findtext("product_name"))
        mebibytes = (gpu.findtext("fb_memory_usage/total") or "").removesuffix(" MiB")
        _equal(visit, "memory, MiB", (reported["memory_bytes"] or 0) >> 20, mebibytes)
        mig = gpu.findtext("mig_mode/current_mig") == "Enabled"
        _equal(visit, "divided (MIG)", bool(reported["mig"]), mig)
        if "uuid" in reported:
            _equal(visit, "uuid", reported["uuid"], gpu.findtext("uuid"))


def _telemetry(visit: Visit, found: Mapping[str, Any]) -> None:
    """Samples before a process, while it holds memory, and while it computes."""
    parser = TelemetryParser()
    with ExitStack() as stack:
        stream = stack.enter_context(Lines([*_PROBES, "telemetry", "1"]))

        def sample(until: Callable[[Mapping[str, Any]], bool], limit_s: float = 20.0) -> Mapping[str, Any]:
            """The first one for which it holds, or the last one before the limit."""
            deadline = time.monotonic() + limit_s
            values: Mapping[str, Any] = {}
            while time.monotonic() < deadline:
                values = parser.read(stream.next(limit_s)) or values
                if values and until(values):
                    break
            return values

        before = sample(lambda values: _used(visit, values) is not None)
        size = str(ALLOCATED if not visit.dry else 1 << 20)
        process = stack.enter_context(Lines([visit.python, "-c", _PROCESS, visit.device, size]))
        known = json.loads(process.next(60.0))
        first = _used(visit, before) or 0
        held = sample(lambda values: (_used(visit, values) or 0) >= first + ALLOCATED or visit.dry)
        process.stdin.write(b"compute\n")
        process.stdin.flush()
        use = "cpu_use" if visit.dry else "gpu_use"
        busy = sample(lambda values: (values.get(use) or 0) > 0.05).get(use) or 0.0
        load = json.loads(visit.call([*_PROBES, "load"]).output)
        if visit.dry:
            visit.result(
                "telemetry: use of the CPU while a process computes",
                busy,
                ok=busy > 0,
                target="> 0",
            )
            return
        visit.record("nvidia-smi while a process computes", visit.call(["nvidia-smi"], limit_s=15.0).output)
        _held(visit, "telemetry: memory in use, grown by", (_used(visit, held) or 0) - first)
        visit.result(
            "telemetry: use of the GPU while a process computes",
            busy,
            ok=busy > 0.05,
            target="> 0.05",
        )
        visit.record("telemetry: a sample", json.dumps(held, default=str))
        _process_facts(visit, found, known, load)
    used = gpu_used_mib(visit)
    visit.result(
        "memory in use after the process, MiB", used, target=f"<= {(first >> 20) + 64}", ok=used <= (first >> 20) + 64
    )


def _used(visit: Visit, values: Mapping[str, Any]) -> int | None:
    """Bytes in use of the first GPU, with `dry` of the machine."""
    if visit.dry:
        return values.get("memory_used_bytes")
    memories = values.get("gpu_memory") or ()
    return memories[0].used_bytes if memories else None


def _held(visit: Visit, name: str, used: int) -> None:
    low, high = ALLOCATED >> 20, (ALLOCATED + CONTEXT) >> 20
    visit.result(name, used >> 20, unit="MiB", target=f"{low} to {high}", ok=low <= used >> 20 <= high)


def _process_facts(visit: Visit, found: Mapping[str, Any], known: Mapping[str, Any], load: Mapping[str, Any]) -> None:
    """What PyTorch itself says of the card, and what nvidia-smi lists of the process."""
    (gpu, *_) = found["gpus"]
    _equal(visit, "name, by PyTorch", gpu["name"], known["name"])
    _equal(visit, "compute capability, by PyTorch", gpu["compute_capability"], known["capability"])
    visit.result("PyTorch's total memory over the card's", known["memory"] / gpu["memory_bytes"], unit="×")
    rows = dict(re.findall(r"^(\d+), (\d+)", load.get("nvidia") or "", re.MULTILINE))
    # In a container nvidia-smi may list the pids of the host, or no process at all.
    listed = rows.get(str(known["pid"])) or max(rows.values(), key=int, default=None)
    if listed is None:
        visit.result("load: memory of the process", "not listed", note=(load.get("nvidia") or "nothing")[:200])
    else:
        _held(visit, "load: memory of the process", int(listed) << 20)
