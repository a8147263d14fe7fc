"""Runs the PyTorch trainer on this machine: one process of the nodes' python per rank, with the environment that the
keeper gives it, and nothing around them. Each is forked from one that has imported PyTorch, see tests.fork_server.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.protocol.attempt import (
    CONTROL_FD_ENV,
    EVENTS_ENV,
    SPEC_ENV,
    STOP,
    AttemptSpec,
    NodeFiles,
    RankSpec,
    write_atomic,
)
from tests.forked import LIMIT_S, ROOT, Forked, ForkServer
from tests.needs import TORCH
from tests.waiting import wait_until


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer(str(TORCH), "engine.torch_trainer.main", "import_trainer", "gloo")


def output_of(module: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> Any:
    """The JSON in the last line that a module prints."""
    with tempfile.TemporaryFile() as output:
        process = Forked(fork_server(), module, *arguments, environment=environment, output=output.fileno())
        code = process.wait(LIMIT_S)
        output.seek(0)
        text = output.read().decode()
    assert code == 0, text[-3000:]
    return json.loads(text.splitlines()[-1])


@dataclass
class TorchRun:
    """Ranks under way or over."""

    files: list[NodeFiles]
    """By rank."""
    processes: list[Forked | subprocess.Popen[bytes]]
    controls: list[int]
    """The keepers' ends of the ranks' control pipes."""

    def stop(self, rank: int) -> None:
        os.write(self.controls[rank], STOP)

    def wait(self) -> list[int]:
        """The ranks' exit codes."""
        try:
            return [process.wait(LIMIT_S) for process in self.processes]
        finally:
            for process, control in zip(self.processes, self.controls, strict=True):
                process.kill()
                os.close(control)

    def succeeded(self) -> TorchRun:
        codes = self.wait()
        assert codes == [0] * len(codes), "\n".join(self.log(rank)[-3000:] for rank in range(len(codes)))
        return self

    def log(self, rank: int = 0) -> str:
        return self.files[rank].log(rank).read_text()

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        path = self.files[rank].events(rank)
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in events if event["event"] == kind]

    def losses(self) -> dict[int, float]:
        return {event["iteration"]: event["loss"] for event in self.events("step")}


def start_torch(
    directory: Path,
    job: Mapping[str, Any],
    *,
    ranks: int = 1,
    attempt: int = 1,
    homes: list[str] | None = None,
    fields: Mapping[str, Any] | None = None,
    backend: str = "gloo",
    command: Sequence[str] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> TorchRun:
    """`homes`: the ranks' nodes, as names of folders, one for all without; `fields`: of AttemptSpec; `command`: started
    for each rank in place of a forked trainer; `env`: of the ranks, over what the keeper gives them."""
    names = homes or ["node"] * ranks
    directory.mkdir(parents=True, exist_ok=True)
    specs = [RankSpec(rank, f"n{rank}", str(TORCH), str(directory)) for rank in range(ranks)]
    spec = AttemptSpec(
        "run",
        attempt,
        uuid.uuid4().hex,
        backend,
        ranks,
        specs,
        dict(job),
        trainer="engine.torch_trainer.main",
        **(fields or {}),
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = TorchRun([NodeFiles.for_attempt(directory / name, "run", attempt) for name in names], [], [])
    for rank, files in enumerate(run.files):
        files.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(files.spec, spec.to_json())
        read, write = os.pipe()
        run.controls.append(write)
        own = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MLX_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            SPEC_ENV: str(files.spec),
            EVENTS_ENV: str(files.events(rank)),
        }
        environment = {**os.environ, **own, **env}
        with files.log(rank).open("wb") as log:
            process: Forked | subprocess.Popen[bytes]
            if command:
                environment |= {CONTROL_FD_ENV: str(read), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, pass_fds=[read])
            else:
                module, handed = "engine.torch_trainer.main", {CONTROL_FD_ENV: read}
                process = Forked(fork_server(), module, environment=environment, output=log.fileno(), handed=handed)
        os.close(read)
        run.processes.append(process)
    return run


def run_torch(directory: Path, job: Mapping[str, Any], **options: Any) -> TorchRun:
    return start_torch(directory, job, **options).succeeded()


def wait_for_event(run: TorchRun, kind: str) -> None:
    """Until rank 0 has reported it. Fails when a rank ends before."""

    def reported() -> bool:
        assert all(process.poll() is None for process in run.processes), run.log()[-3000:]
        return bool(run.events(kind))

    wait_until(reported, LIMIT_S)
