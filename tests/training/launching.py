"""A real launch on this machine: mlx.launch, start.sh, a keeper per rank, and the trainer, without a supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from engine.launch import mlx_launch
from engine.launch.ssh_shim import temporary_files
from engine.launch.start_script import start_script
from engine.node import processes
from engine.protocol.attempt import (
    NONCE_ENV,
    AttemptSpec,
    ExitRecord,
    NodeFiles,
    RankSpec,
    read_exit,
    read_identity,
    write_atomic,
)
from tests.bundles import link_bundle
from tests.unit.launch.host_layouts import ring_ports
from tests.waiting import wait_until

LIMIT_S = 400.0


@dataclass
class Launched:
    """An attempt under way or over."""

    launcher: subprocess.Popen[bytes]
    files: NodeFiles
    ranks: int
    nonce: str

    @property
    def home(self) -> Path:
        """The run's folder on the node: here, of all ranks."""
        return self.files.directory.parents[1]

    def kill(self, *ranks: int) -> None:
        """kill -9 of these ranks' trainers, all at the same moment: none sees another one's end."""
        identities = [read_identity(self.files.identity(rank)) for rank in ranks]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for identity in identities:
                assert identity is not None
                os.kill(identity.trainer_pid, number)

    def freeze(self, rank: int) -> None:
        """SIGSTOP to a rank's trainer."""
        identity = read_identity(self.files.identity(rank))
        assert identity is not None
        os.kill(identity.trainer_pid, signal.SIGSTOP)

    def exit(self, rank: int) -> ExitRecord | None:
        return read_exit(self.files.exit(rank))

    @property
    def adapters(self) -> Path:
        return self.files.directory.parents[1] / "adapters"

    def weights(self) -> dict[str, np.ndarray]:
        """The saved adapters."""
        found = mx.load(str(self.adapters / "adapters.safetensors"))
        assert isinstance(found, dict)
        return {name: np.asarray(value) for name, value in found.items()}

    def events(self, rank: int = 0, kind: str | None = None) -> list[dict[str, Any]]:
        path = self.files.events(rank)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        parsed = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in parsed if kind in (None, event["event"])]

    def log(self, rank: int = 0) -> str:
        return self.files.log(rank).read_text()

    def losses(self, rank: int = 0) -> list[float]:
        return [event["loss"] for event in self.events(rank, "step")]

    def send(self, command: bytes) -> None:
        """To all ranks at once: none exits before another has received it."""
        with contextlib.ExitStack() as stack:
            fifos = [stack.enter_context(self._fifo(rank)) for rank in range(self.ranks)]
            for fifo in fifos:
                fifo.write(command)

    def send_to(self, rank: int, command: bytes) -> None:
        with self._fifo(rank) as fifo:
            fifo.write(command)

    def _fifo(self, rank: int) -> BinaryIO:
        return os.fdopen(os.open(self.files.control(rank), os.O_RDWR), "wb", buffering=0)

    def ended(self) -> list[ExitRecord]:
        """Awaits the end of all ranks, with nothing left behind."""
        wait_until(lambda: all(read_exit(self.files.exit(rank)) is not None for rank in range(self.ranks)), LIMIT_S)
        self.launcher.wait(LIMIT_S)
        wait_until(lambda: processes.with_nonce(self.nonce) == [])
        records = [read_exit(self.files.exit(rank)) for rank in range(self.ranks)]
        return [record for record in records if record is not None]

    def succeeded(self) -> Launched:
        """Awaits a success of all ranks."""
        records = self.ended()
        assert [record.code for record in records] == [0] * self.ranks, [self.log(r)[-2000:] for r in range(self.ranks)]
        return self


def launch(
    directory: Path,
    job: dict[str, Any] | None,
    *,
    shares: tuple[float, ...] = (1.0,),
    overrides: dict[int, dict[str, Any]] | None = None,
    spec_fields: dict[str, Any] | None = None,
    attempt: int = 1,
) -> Launched:
    """Launch `job` on one local rank per share; `overrides` changes single ranks' specs."""
    directory.mkdir(parents=True, exist_ok=True)
    files = NodeFiles.for_attempt(directory / "node", "run", attempt)
    files.directory.mkdir(parents=True)
    ranks = [
        RankSpec(
            **{
                "rank": rank,
                "node": f"n{rank}",
                "python": sys.executable,
                "workdir": str(directory),
                "share": share,
                **(overrides or {}).get(rank, {}),
            }
        )
        for rank, share in enumerate(shares)
    ]
    nonce = uuid.uuid4().hex
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    fields = {"env": environment, "lease_s": LIMIT_S, "world_size": len(ranks), **(spec_fields or {})}
    spec = AttemptSpec(run_id="run", attempt=attempt, nonce=nonce, backend="ring", ranks=ranks, job=job, **fields)
    write_atomic(files.spec, spec.to_json())
    write_atomic(files.start, start_script(spec, files, link_bundle(directory / "node")))
    if job is not None and job.get("strategy") == "local":
        run = Launched(_run_directly(files, len(ranks), nonce), files, len(ranks), nonce)
        wait_until(lambda: all(files.control(rank).exists() for rank in range(len(ranks))), LIMIT_S)
        return run
    started = run_under_launcher(files.directory, len(ranks), ["/bin/sh", str(files.start)], nonce)
    assert started.process is not None
    run = Launched(started.process, files, len(ranks), nonce)
    wait_until(lambda: all(files.control(rank).exists() for rank in range(len(ranks))), LIMIT_S)
    started.drop_pipes()
    return run


def _run_directly(files: NodeFiles, ranks: int, nonce: str) -> subprocess.Popen[bytes]:
    """A shell that starts every rank and awaits them: none is ended when another one ends."""
    port = ring_ports(ranks)
    hostfile = files.directory / "mlx_hostfile.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port + rank}"] for rank in range(ranks)]))
    each = f'MLX_RANK=$rank /bin/sh "{files.start}" &'
    script = f"for rank in {' '.join(map(str, range(ranks)))}; do {each} done; wait"
    environment = {**os.environ, NONCE_ENV: nonce, "MLX_HOSTFILE": str(hostfile)}
    return subprocess.Popen(["/bin/sh", "-c", script], env=environment, stdin=subprocess.DEVNULL)


def run_under_launcher(directory: Path, ranks: int, program: list[str], nonce: str) -> mlx_launch.Launcher:
    """Start `program` on `ranks` local ranks by mlx.launch, whose own files are in `directory`."""
    hostfile = directory / "hostfile.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * ranks))
    argv = mlx_launch.arguments(
        hostfile=hostfile, starting_port=ring_ports(ranks), program=program, environment={NONCE_ENV: nonce}
    )
    return mlx_launch.start(
        argv,
        stdin=directory / "launcher.in",
        output=directory / "launcher.log",
        environment={NONCE_ENV: nonce, **temporary_files(directory)},
        directory=directory,
    )
