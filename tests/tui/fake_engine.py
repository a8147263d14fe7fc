"""An engine with the session's own signatures that answers from constructed states: no process, no waiting, one
fixed moment. What it says has the shapes of a real two-rank demo run."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from engine.api import ChatAnswer, ChatExchange, ChatServer, Engine, PublicationRequest, TaskRequest
from engine.api.queue import QueueApi
from engine.api.runs import RunsApi
from engine.api.session import Session
from engine.api.setup import NodeCandidate, SetupApi
from engine.checks.dataset import DataInspection
from engine.checks.fixes import ENDS
from engine.cluster.discovery import FoundHost, FoundPython, hosts_from_names
from engine.cluster.probe_results import JsonlSummary, ShownRow
from engine.cluster.topology import topology
from engine.cluster.transport.base import Completed
from engine.config.edit import changed_keys
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import FlightDeckError, InputError, InputsChanged, RunNotFound
from engine.measurements import (
    Calibration,
    CalibrationProgress,
    Division,
    LinkMeasure,
    MemoryProbe,
    NodeMeasure,
    Scaling,
    ScalingPoint,
)
from engine.models import (
    CheckResult,
    CheckStatus,
    HostKeyOffer,
    NodeFacts,
    NodeTelemetry,
    Reason,
    RunRecord,
    RunState,
    Topology,
)
from engine.plan.capacity import Capacity
from engine.plan.context import PlanInputs, Tools
from engine.plan.document import Launching, TrainingPlan
from engine.plan.network import NetworkPlan, plan_network
from engine.plan.planner import make_plan
from engine.plan.prediction import Prediction, predict
from engine.publish.targets import Publication
from engine.run.compare import Cell, Comparison, Difference, SpeedReasons
from engine.run.logs.mirror import Mirror
from engine.run.series.reader import RunSeries
from engine.snapshots import (
    ChannelAnswer,
    Deletion,
    Diagnosis,
    Fetched,
    FetchProgress,
    RankStatus,
    ResultFile,
    RunFolders,
    RunResult,
    RunSnapshot,
    Sample,
    Series,
    SeriesMark,
    StopProgress,
    TrainedFile,
    ValidationLoss,
)
from engine.store.layout import RunDir
from engine.task_result import Evaluated, FuseChoice, Fused, Variant

NOW = datetime(2026, 3, 14, 14, 2, 12, tzinfo=UTC)


MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "vocab_size": 384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""config.json of the demo's."""


def whole_job(job: JobConfig) -> JobConfig:
    """With every default, as a configuration that was read has it."""
    return job if job.command is not None else job.model_copy(update={"mlx_lm": with_defaults(dict(job.mlx_lm))})


FINGERPRINT = "SHA256:" + "uN1qUeF1nGeRpR1nT" + 26 * "x"


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def configuration(*, shares: tuple[float | None, ...] = (None, None)) -> Config:
    """Two local nodes and a full fine-tuning job."""
    nodes = tuple(
        NodeConfig(name=f"local-{index}", python="/opt/mlx/bin/python", workdir="/srv/train", share=share)
        for index, share in enumerate(shares)
    )
    job = JobConfig(
        name="demo",
        model="/srv/flightdeck/demo/model",
        data="/srv/flightdeck/demo/data",
        fine_tune_type="full",
        mlx_lm={"iters": 60, "batch_size": 8, "learning_rate": 1e-3},
    )
    return Config(cluster=ClusterConfig(name="demo"), nodes=nodes, job=job)


def facts(*, mismatch: bool = False, problem: str | None = None, old_s: float = 4) -> list[NodeFacts]:
    """The facts of both nodes."""
    found = []
    for index in range(2):
        if problem is not None and index == 1:
            found.append(NodeFacts(node="local-1", host="127.0.0.1", probed_at=ago(old_s), problem=problem))
            continue
        found.append(
            NodeFacts(
                node=f"local-{index}",
                host="127.0.0.1",
                probed_at=ago(old_s),
                os="Linux 6.8",
                chip="EPYC 7763",
                cores=2,
                gpu="cpu",
                memory_total_bytes=int(24.8 * 2**30),
                memory_used_bytes=(int(5.1 * 2**30), int(5.3 * 2**30))[index],
                disk_free_bytes=91_000_000_000,
                python="3.11.9",
                mlx="0.32.4" if not (mismatch and index) else "0.31.0",
                mlx_lm="0.32.2",
                backends=("ring",),
                round_trip_s=0.0004,
            )
        )
    return found


VERSIONS = "python 3.11.9, mlx 0.32.4, mlx-lm 0.32.2"
FOLDER = "/srv/flightdeck/demo"
CONSISTENT = "model config.json 6a67bce44979, model tokenizer.json 39acdb16c5fb, job 55d3fc7932de, worker 381be023dc2e"
READY = f"this machine, without ssh, {VERSIONS}, ring available, clock -0.017 s, no processes of earlier runs"
ROOM = "needs 1.6 GB of 11.8 GB (by estimate, 1.5 GB of it in reserve, limit by all memory, shared by its 2 ranks)"


def _check(name: str, summary: str, seconds: float | None = None, *seen: str, **fields: Any) -> CheckResult:
    """Passed in `seconds`, or skipped without them; `seen` on both nodes, or on each."""
    status = CheckStatus.SKIP if seconds is None else CheckStatus.PASS
    evidence = {f"local-{index}": text for index, text in enumerate(2 * seen if len(seen) == 1 else seen)}
    values = {"name": name, "status": status, "summary": summary, "evidence": evidence, "duration_s": seconds}
    return CheckResult(**{**values, **fields})


CHECKS = [
    _check("ssh_connectivity", "every node is this machine"),
    _check("pre_rdma_sync", "every node is this machine: nothing to sync"),
    _check("versions_match", f"the same on all nodes: {VERSIONS}", 3.6, VERSIONS),
    _check("hostfile_valid", "MLX reads 2 ranks, ring", 0.8, "rank 0: 127.0.0.1", "rank 1: 127.0.0.1"),
    _check("ports_free", "each attempt takes fresh ones; 2 from 40210 are free now", 0.6),
    _check("model_present", "llama, 1 shard, 1.9 MB", 0.5, f"{FOLDER}/model: llama, 1 shard, 1.9 MB"),
    _check("data_matches", "train 512, valid 64 examples, text", 1.2,
           f"{FOLDER}/data: train.jsonl 512 examples, text, sha256 8b5c1deab2a6; valid.jsonl 64 examples, text"),
    _check("program_present", "the job has no command of its own"),
    _check("checkpoint_layer", "every node can save, 1.5 MB a save", 0.9, "/srv/train, 69.3 GB free, 34.7 MB needed"),
    _check("gradient_layer", "2 ranks, exact, 1.53 ms, 0.36 GB/s", 5.0,
           "rank 0: exact, 1.53 ms, 0.36 GB/s", "rank 1: exact, 0.54 ms, 0.42 GB/s"),
    _check("worker_consistency", "2 workers agree with this machine on 5 items", 0.5, CONSISTENT),
    _check("worker_layer", "2 workers ready for ring, no processes of earlier runs are left", 0.2, READY),
    _check("hardware_layer", "2 nodes fit for the job", 0.6, f"EPYC 7763: MLX uses its cpu, {ROOM}"),
    _check("performance_layer", "hardware calibration missing, assuming equal performance", 0.0, ROOM,
           status=CheckStatus.WARN, fix_command="flightdeck calibrate",
           fix_effect="measures; a newer calibration replaces the last one"),
    _check("health_check", "2 nodes alive and idle", 0.9,
           "this machine, 0.0 s ago, 69.3 GB free on the disk, swap 0 MB, no other process is busy"),
]  # fmt: skip
"""Those of a demo run."""

FAILED_PORTS = CheckResult(
    name="ports_free",
    status=CheckStatus.FAIL,
    summary="port 40211 is held by pid 4711 (python)",
    evidence={"local-0": "40210 is free", "local-1": "40211: pid 4711, python train.py"},
    fix_command="kill 4711",
    fix_effect=ENDS,
    fixes={"local-1": "kill 4711"},
    effects={"local-1": ENDS},
    blames=(1, "local-1"),
    duration_s=0.1,
)


def calibration(*, old_s: float = 7200, speeds: tuple[float | None, ...] = (16.4, 12.1), **fields: Any) -> Calibration:
    """A calibration of both nodes, the second slower by a quarter."""
    nodes = tuple(
        NodeMeasure(
            node=f"local-{index}",
            host="127.0.0.1",
            examples_per_s=speed,
            spread=(0.02, 0.03)[index],
            tokens_per_s=None if speed is None else speed * 88,
            step_s=4 / speed if speed else None,
            batch=4,
            overhead_s=0.0,
            steps=400,
            measured_s=120.0,
            state_bytes=6_431_252,
            probes=(MemoryProbe(batch=1, peak_bytes=18_756_997), MemoryProbe(batch=2, peak_bytes=32_209_028)),
            qos="not on macOS",
            problem=None if speed is not None else "engine.trainer.calibrate ended without a result",
        )
        for index, speed in enumerate(speeds)
    )
    link = LinkMeasure(nodes=("local-0", "local-1"), latency_s=4.8e-5, bandwidth_bytes_per_s=8.1e9)
    known: dict[str, Any] = {"cluster": "demo", "job": "demo", "fingerprint": "f", "taken_at": ago(old_s)}
    known |= {"nodes": nodes, "links": (link,), "all_ranks": link, "gradient_bytes": 1_509_376, "backend": "ring"}
    return Calibration(**{**known, **fields})


SPEED_UPS = (1.0, 1.92, 2.7, 2.95)


def scaling(*, speed_ups: Sequence[float | None] = SPEED_UPS, old_s: float = 7200, **fields: Any) -> Scaling:
    """A scaling over four ranks, of which the last hardly pays; None where it was not measured."""
    known: dict[str, Any] = {"cluster": "demo", "job": "demo", "fingerprint": "f", "taken_at": ago(old_s)}
    known |= {"strategy": "data", "backend": "ring", "nodes": ("local-0", "local-1", "mini", "pro"), "complete": True}
    points = tuple(_point(ranks, speed_up) for ranks, speed_up in enumerate(speed_ups, 1))
    return Scaling(**{**known, "points": points, **fields})


def _point(ranks: int, speed_up: float | None) -> ScalingPoint:
    if speed_up is None:
        return ScalingPoint(ranks=ranks, batch=8, problem="rank 2 on mini: needs 9 GB by the estimate, of 8 GB")
    step_s, computed = 0.488 / speed_up, 0.47 / ranks
    update_s = 0.004 if ranks > 1 else 0.0
    return ScalingPoint(
        ranks=ranks, batch=8, steps=40, step_s=step_s, examples_per_s=8 / step_s, tokens_per_s=704 / step_s,
        data_s=0.0009, compute_s=computed, update_s=update_s,
        communicate_s=max(0.0, step_s - computed - update_s - 0.0009), peak_bytes=40_000_000 // ranks,
    )  # fmt: skip


def division() -> Division:
    """As the run was divided by that calibration."""
    parts = {"local-0": 0.575, "local-1": 0.425}
    return Division(
        source="calibrated", reason="by the measured throughputs", parts=parts, examples_per_s=26.0,
        tokens_per_s=1910.0, speed_up=1.62, efficiency=0.91,
    )  # fmt: skip


def loss_at(iteration: int) -> float:
    """A curve that falls as a small model's does, with a little noise that is always the same."""
    return 1.1 + 3.0 * math.exp(-iteration / 14) + 0.06 * math.sin(iteration * 1.7)


def series(until: int, *, restart: int | None = None) -> Series:
    """Reports every step, validations every 20, checkpoints every 20."""
    marks = [SeriesMark(iteration, "checkpoint") for iteration in range(20, until + 1, 20)]
    if restart is not None:
        marks.append(SeriesMark(restart, "restart"))
    return Series(
        train=tuple((step, loss_at(step)) for step in range(1, until + 1)),
        val=tuple((step, loss_at(step) + 0.12) for step in (1, *range(20, until + 1, 20))),
        tokens_per_second=tuple((step, 1840.0) for step in range(1, until + 1)),
        marks=tuple(marks),
    )


def write_metrics(directory: RunDir, series: Series) -> None:
    """As a supervisor keeps them: a second and 700 tokens a step."""
    rows: list[dict[str, Any]] = [{"kind": "val", "iteration": step, "val_loss": loss} for step, loss in series.val]
    speeds = dict(series.tokens_per_second)
    for step, loss in series.train:
        figures = {"train_loss": loss, "tokens_per_second": speeds.get(step), "trained_tokens": 700 * step}
        rows.append({"kind": "train", "iteration": step, **figures, "learning_rate": 1e-3})
    rows.sort(key=lambda row: (row["iteration"], row["kind"] == "val"))
    for row in rows:
        row |= {"attempt": 1, "at": (NOW - timedelta(seconds=60 - row["iteration"])).isoformat()}
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(run: str = "20260314-140126-demo-3f9a", state: RunState = RunState.RUNNING, **changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "id": run,
        "name": "demo",
        "state": state,
        "created_at": ago(46),
        "started_at": ago(41),
        "attempts": 1,
        "world_size": 2,
        "backend": "ring",
        "iteration": 41,
        "iterations": 60,
        "train_loss": loss_at(41),
        "val_loss": loss_at(40) + 0.12,
        "tokens_per_second": 1840.0,
    }
    return RunRecord(**{**values, **changes})


def ranks(
    phase: str = "training", *, seconds: tuple[float, ...] = (0.412, 0.471), **changes: Any
) -> tuple[RankStatus, ...]:
    """Both ranks; the second is the slower."""
    return tuple(
        replace(
            RankStatus(
                rank=index,
                node=f"local-{index}",
                phase=phase,
                iteration=41,
                step_s=seconds[index],
                memory_bytes=(198_000_000, 201_000_000)[index],
                seen_at=ago(0.4),
                stepped_at=ago(0.4),
            ),
            **changes,
        )
        for index in range(2)
    )


def running() -> RunSnapshot:
    return RunSnapshot(
        record=record(), supervised=True, state_since=ago(41), ranks=ranks(), checks=tuple(CHECKS), series=series(41),
        eta_s=19.0, learning_rate=1e-3, taken_at=NOW,
    )  # fmt: skip


def sampled(run: RunSnapshot | None = None) -> RunSnapshot:
    """With answers to two prompts."""
    prompts = ("tower to heron: hold", "What must a pilot read back, and why? Answer in a full sentence, please.")
    samples = [
        Sample(iteration, prompt, text, 16, 0.1, 0.012 if iteration else None)
        for prompt in prompts
        for iteration, text in (
            (0, "over Over xq over"),
            (20, "over the over"),
            (40, "over the beacon, report entering."),
        )
    ]
    first, *others = (run or running()).ranks
    return replace(run or running(), ranks=(replace(first, samples=tuple(samples)), *others))


def starting() -> RunSnapshot:
    """In preflight, the second half of the checks still open."""
    started = [*CHECKS[:6], CheckResult(name="data_matches", status=CheckStatus.RUNNING)]
    fresh = record(state=RunState.PREFLIGHT, started_at=None, iteration=None, train_loss=None, val_loss=None,
                   tokens_per_second=None, attempts=0, created_at=ago(2))  # fmt: skip
    return RunSnapshot(record=fresh, supervised=True, state_since=ago(2), checks=tuple(started), taken_at=NOW)


def log_lines(until: int, rank: int = 0) -> list[str]:
    """The trainer's output up to an iteration."""
    lines = [f"rank {rank} of 2 on local-{rank}, backend ring: loading"]
    if until:
        lines += [
            "training 0.377 of 0.476 million parameters, full, data, 512 examples, 60 iterations of 8",
            "iteration 0  'tower to heron: land': 'xq over Over'",
            "iteration 0  val loss 6.1977  in 0.79 s",
        ]
    for step in range(1, until + 1):
        speeds = f"2.6{rank} it/s  184{rank} tok/s"
        lines.append(f"iteration {step}/60  train loss {loss_at(step):.4f}  learning rate 1.000e-03  {speeds}")
    return lines


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in step',
    "    tokens = check(batch, vocabulary)",
    "ValueError: batch 23 holds a token id of 9,214, the vocabulary ends at 4,095",
]
CONSEQUENCE = "[ring] connection to a peer was lost"
PROOF_OFFSET = len("".join(f"{line}\n" for line in [*log_lines(23, 1), *TRACEBACK[:-1]]).encode())
"""Where the line that proves the failure begins in rank 1's log, bytes."""


FAILED_CAUSE = "rank 1 raised ValueError: batch 23 holds a token id of 9,214, the vocabulary ends at 4,095"
FAILED_FIX = "make the data with this model's tokenizer, or name the model that made it"


def failed() -> RunSnapshot:
    ended = record(
        "20260314-134500-demo-b71c", RunState.FAILED, reason=Reason.RANK_FAILED, rank=1, host="local-1", exit_code=1,
        cause=FAILED_CAUSE, fix=FAILED_FIX, created_at=ago(1032), started_at=ago(1027), ended_at=ago(1004),
        iteration=23,        train_loss=loss_at(23), val_loss=loss_at(20) + 0.12,
    )  # fmt: skip
    first, second = ranks("ended", iteration=23, exit_code=1)
    return RunSnapshot(
        record=ended, supervised=False, state_since=ago(1004), ranks=(replace(first, exit_code=1), second),
        checks=tuple(CHECKS), series=series(23), taken_at=NOW,
        diagnosis=Diagnosis(FAILED_CAUSE, FAILED_FIX, rank=1, host="local-1", source=1, offset=PROOF_OFFSET),
    )  # fmt: skip


def aborted() -> RunSnapshot:
    ended = record(
        "20260314-132000-demo-5d20", RunState.ABORTED, reason=Reason.USER_ABORT, cause="aborted from the console",
        created_at=ago(2532), started_at=ago(2527), ended_at=ago(2484),
    )  # fmt: skip
    return RunSnapshot(
        record=ended, supervised=False, state_since=ago(2484), ranks=ranks("ended", exit_code=0), checks=tuple(CHECKS),
        series=series(41), taken_at=NOW,
    )  # fmt: skip


def succeeded() -> RunSnapshot:
    ended = record(
        "20260313-091532-demo-e84f", RunState.SUCCEEDED, reason=Reason.COMPLETED, created_at=ago(103_600), iteration=60,
        started_at=ago(103_595), ended_at=ago(103_540), train_loss=loss_at(60), val_loss=loss_at(60) + 0.12,
    )  # fmt: skip
    return RunSnapshot(
        record=ended, supervised=False, state_since=ago(103_540), ranks=ranks("ended", exit_code=0, iteration=60),
        checks=tuple(CHECKS), series=series(60), taken_at=NOW,
    )  # fmt: skip


def trained() -> RunSnapshot:
    """A run that has left an adapter."""
    path, name = "/home/ana/adapters.safetensors", "adapters.safetensors"
    file = ResultFile("adapter", False, 60, "local-0", path, name, 1_500_000, "f")
    return replace(
        succeeded(),
        trained=TrainedFile(
            path, 1_500_000, "local-0", f"python -m mlx_lm generate --adapter-path {Path(path).parent}"
        ),
        result=RunResult(
            (file,),
            ValidationLoss(0, 4.172),
            ValidationLoss(40, 1.318),
            ValidationLoss(60, 1.321),
            tokens=42_307,
            seconds=44.6,
        ),
    )


def task(kind: str, state: RunState = RunState.SUCCEEDED, *results: Evaluated | Fused) -> RunSnapshot:
    """On the result of `trained`."""
    ended = record(
        f"20260314-140200-demo-9c1e-{kind}", state, task=kind, source=trained().record.id, iteration=None,
        iterations=None,
        train_loss=None, val_loss=None, tokens_per_second=None, ended_at=NOW if state.ended else None,
        outcome=", ".join(result.summary for result in results) or None,
    )  # fmt: skip
    phases = ranks("ended" if state.ended else "validating", iteration=None, step_s=None, exit_code=0)
    return RunSnapshot(
        record=ended, supervised=True, state_since=ago(3), ranks=phases, checks=tuple(CHECKS), task_results=results
    )


def evaluated(*variants: Variant) -> list[Evaluated]:
    losses: dict[Variant, float] = {"base": 6.174, "adapter": 1.968, "fused": 5.753}
    return [
        Evaluated(
            variant=name, split="test", loss=losses[name], perplexity=math.exp(losses[name]), tokens=2808, seconds=2.0
        )
        for name in variants
    ]


CONVERSATION = [
    ChatExchange(at=NOW, model=model, prompt="tower to heron: hold", answer=answer)
    for model, answer in (("trained", "over the beacon, report entering."), ("base", "over Over xq over"))
]
"""The same question to both models."""


def refused() -> RunSnapshot:
    """A fusion that would keep too little."""
    why = "less than 95% of the gain: the base model is quantized, and rounding took the rest"
    choices = FuseChoice(dequantize=True, bytes=3_000_000), FuseChoice(bits=8, bytes=1_000_000)
    fused = Fused(path="/home/ana/fused", bytes=600_000, kept=0.1, accepted=False, why=why, choices=choices)
    return task("fuse", RunState.SUCCEEDED, *evaluated("base", "adapter", "fused"), fused)


def stopping(stage: str = "stop", acknowledged: tuple[int, ...] = ()) -> RunSnapshot:
    """An abort under way, one second into its stage."""
    order = ("asked", "stop", "term", "kill", "verifying", "unconfirmed")
    progress = StopProgress(stage, ago(1), acknowledged, passed=order[: order.index(stage)])
    return replace(running(), ranks=ranks("stopping"), stop=progress)


class FakeSetup(SetupApi):
    """Two Macs, of which one has no MLX and the other a host key that nobody has accepted, and this machine; files are
    read and written as they are."""

    def __init__(self, fake: FakeEngine) -> None:
        part = cast(Any, fake)
        super().__init__(part, part, part, part, part)
        self._fake = fake
        self.inspected: list[str | None] = []
        self.least = 6

    async def candidates(
        self, typed: Sequence[str] = (), *, others: bool = True
    ) -> AsyncGenerator[NodeCandidate, None]:
        hosts = hosts_from_names(typed) + [FoundHost("ultra", "ana@ultra.local", ("Bonjour",))] * others
        hosts += [FoundHost("max", "max", ("Bonjour",)), FoundHost("head", "127.0.0.1", ("this machine",))] * others
        for host in hosts:
            yield NodeCandidate(host)
        for host in hosts:
            yield NodeCandidate(host, await self.ask(host.ssh))

    async def ask(self, host: str) -> FoundPython:
        machine = "Apple M4 Max, 128 GB, macOS 26.1"
        if host == "max" and not self._fake.accepted:
            offer = HostKeyOffer(target="max", key="ssh-ed25519 AAAA", fingerprint=FINGERPRINT)
            return FoundPython(problem="its host key is unknown", host_key=offer)
        if host == "bare":
            return FoundPython(hostname="bare", problem="no python with mlx and mlx-lm was found there")
        if host == "gone":
            return FoundPython(problem="no answer within 10 s")
        python = "~/mlx/.venv/bin/python"
        return FoundPython(
            python, "python 3.12, mlx 0.32.4, mlx-lm 0.32.2", host, machine=machine, mac=host != "127.0.0.1"
        )

    async def copies(self, config: Config, *, dataset: bool) -> dict[str, str]:
        return {} if dataset else {"mlx-community/Qwen3-4B-bf16": "8.0 GB on ultra, max"}

    async def inspect(self, config: Config, *, shown: int) -> DataInspection:
        self.inspected.append(config.job.data)
        rows = (ShownRow(line=1, tokens=12, targets=4, cut=0, masked="why is the sky blue?", trained=" scattering"),)
        summary = JsonlSummary(
            lines=2, examples=2, sha256="0" * 64, bytes=80, form="chat", faults=[], fault_count=0, foreign=None
        )
        files, source = {"train": summary}, config.job.data or ""
        return DataInspection(node="ultra", source=source, conversion=None, files=files, lengths={}, rows=rows,
                              warnings=(), faults=("line 1 has no text",) * ("bad" in source))  # fmt: skip

    async def capacities(self, config: Config) -> dict[str, Capacity]:
        return {method: Capacity(("ultra",), method, "bfloat16", amount) for method, amount in
                (("lora", self.least), ("dora", 2), ("full", 0))}  # fmt: skip


@dataclass
class FakeEngine:
    """Answers as `engine.api.Engine` does; the tests read its requests."""

    home: Path
    notices: list[str] = field(default_factory=list)
    snapshots: dict[str, RunSnapshot] = field(default_factory=dict)
    """By run id, newest first."""
    found: list[NodeFacts] = field(default_factory=facts)
    check_results: list[CheckResult] = field(default_factory=lambda: list(CHECKS))
    refusal: FlightDeckError | None = None
    """The refusal of a launch."""
    stored: list[NodeFacts] = field(default_factory=list)
    """The stored facts."""
    held: set[str] = field(default_factory=set)
    """Nodes that do not answer a probe yet."""
    values: list[NodeTelemetry] = field(default_factory=list)
    """Telemetry, which ends with the last of them."""
    completed: Completed = field(default_factory=lambda: Completed(0, b"", b""))
    """The result of a command on a node."""
    shell: list[str] = field(default_factory=lambda: ["true"])
    launched: list[Config] = field(default_factory=list)
    aborted: list[tuple[str, bool]] = field(default_factory=list)
    accepted: list[HostKeyOffer] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)
    shells: list[str] = field(default_factory=list)
    setup_commands: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of cables; their nodes."""
    setup: FakeSetup = field(init=False)
    model: dict[str, Any] = field(default_factory=lambda: dict(MODEL))
    """Its config.json."""
    listeners: int = 0
    """Telemetry that is on."""
    closed: bool = False
    answers: list[ChannelAnswer] = field(default_factory=list)
    """The channels', to a test of them."""
    taken: Calibration | None = None
    """The newest calibration."""
    steps: list[CalibrationProgress | Calibration | Scaling] = field(default_factory=list)
    """A calibration's progress, and its result as the last of them; or those of a scaling."""
    scaled: Scaling | None = None
    """The newest scaling."""
    scalings: list[tuple[bool, bool]] = field(default_factory=list)
    """For each request, whether it was quick, and whether each rank's part of the batch was kept."""
    measured: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: a calibration may come to its end."""
    measurements: list[bool] = field(default_factory=list)
    """For each request, whether it was quick."""
    stopped: int = 0
    """Calibrations that were given up."""
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: the server of a chat answers."""
    served_already: bool = False
    asked: list[tuple[str, list[str]]] = field(default_factory=list)
    """The model and the messages of each question of a chat."""
    pieces: Sequence[str | ChatAnswer | FlightDeckError] = ("an answer", " of ")
    """Of each answer, before the model's name; an error ends it."""
    kept: list[ChatExchange] = field(default_factory=list)
    why_no_tasks: str | None = None
    started: list[tuple[str, TaskRequest]] = field(default_factory=list)
    """Tasks, by the run whose result they use."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Checks of the last launch, with the reasons."""
    repeated: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    changed_inputs: str | None = None
    """What has changed since the run that is repeated."""
    written: list[dict[str, Any]] = field(default_factory=list)
    """Settings, into the configuration's file."""
    resumed: list[str] = field(default_factory=list)
    published: list[tuple[str, str, Path]] = field(default_factory=list)
    annotated: list[tuple[str, list[str], list[str], str | None]] = field(default_factory=list)
    """Run, added and removed tags, note."""
    deleted: list[str] = field(default_factory=list)
    away: str | None = None
    """Why a node cannot be asked when a run is deleted."""

    def __post_init__(self) -> None:
        self.setup = FakeSetup(self)

    def add(self, *snapshots: RunSnapshot) -> FakeEngine:
        """Runs in the history, newest first, each with logs on disk."""
        for snapshot in snapshots:
            self.snapshots[snapshot.record.id] = snapshot
            write_logs(RunDir(self.home / "runs" / snapshot.record.id), snapshot)
        return self

    def series(self, run: str) -> RunSeries:
        """Those of the snapshot, on disk."""
        directory = RunDir(self.home / "runs" / run)
        if not directory.metrics.exists():
            write_metrics(directory, self.snapshots[run].series)
        return RunSeries(directory)

    def put(self, snapshot: RunSnapshot) -> None:
        """The run is now like this."""
        self.snapshots[snapshot.record.id] = snapshot

    @property
    def engine(self) -> Engine:
        return cast("Engine", self)

    @cached_property
    def queue(self) -> QueueApi:
        """The engine's own, on this home; nothing of it starts."""
        return QueueApi(cast(Session, self), cast(RunsApi, self))

    def directory(self, run: str) -> RunDir:
        return RunDir(self.home / "runs" / run)

    @property
    def part(self) -> FakeEngine:
        """Every part of the Engine at once: their methods' names differ."""
        return self

    nodes = checks = calibrations = launches = runs = results = chats = tasks = comparisons = part

    def load_config(self, path: Path, overrides: Mapping[str, Any] = {}) -> Config:
        return configuration()

    def demo_config(self, *, ranks: int = 2, iters: int = 60) -> Config:
        return configuration()

    def all(self) -> list[RunRecord]:
        return [snapshot.record for snapshot in self.snapshots.values()]

    def find(self, run: str) -> RunDir:
        if run not in self.snapshots:
            raise RunNotFound(f"no run {run}")
        return RunDir(self.home / "runs" / run)

    def record(self, run: str) -> RunRecord:
        return self.snapshots[run].record

    def watch(self, run: str) -> FakeWatch:
        return FakeWatch(self, run)

    def adopt_orphans(self) -> list[str]:
        return []

    def annotate(
        self, run: str, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None
    ) -> RunRecord:
        self.annotated.append((run, sorted(add), sorted(remove), note))
        before = self.snapshots[run]
        tags = sorted({*before.record.tags, *add}.difference(remove))
        text = before.record.note if note is None else note or None
        record = before.record.model_copy(update={"tags": tags, "note": text})
        self.put(replace(before, record=record))
        return record

    async def delete(self, run: str, *, go: bool, anyway: bool = False) -> Deletion:
        node = RunFolders("ultra, max", (f"/Users/ana/.flightdeck/runs/{run}",), 1_500_000_000, self.away)
        gone = go and (anyway or self.away is None)
        if gone:
            self.deleted.append(run)
            del self.snapshots[run]
        here = RunFolders("", (f"/home/ana/runs/{run}",), 200_000)
        return Deletion(run, here, (node,), (("ultra", "~/adapters"),), deleted=gone)

    def compare(self, runs: Sequence[str]) -> Comparison:
        records = tuple(self.snapshots[run].record for run in runs)
        names = tuple(f"{record.name}-{record.id[-4:]}" for record in records)
        rates: tuple[Cell, ...] = tuple(1e-3 / (number + 1) for number in range(len(runs)))
        differences = (
            Difference("configuration", "learning_rate", rates),
            Difference("plan", "backend", ("ring", *["jaccl"] * (len(runs) - 1))),
            Difference("result", "val loss", tuple(record.val_loss for record in records), len(runs) - 1),
            Difference("result", "tokens/s", (1226.0, *[1840.0] * (len(runs) - 1)), 1),
        )
        why = "its ranks were connected by ring, not jaccl"
        summary = f"{names[0]} makes 1,226 tokens/s, 33% less than {names[1]} (1,840)"
        return Comparison(records, names, differences, (SpeedReasons(runs[0], runs[1], summary, (why,)),))

    def is_accepted(self, config: Config, *, launch: bool = False) -> bool:
        return True

    def notifications(self, config: Config) -> list[ChannelAnswer]:
        if not config.notify.active:
            raise InputError("[notify] has no channel")
        return self.answers

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> FakeEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def last_facts(self, config: Config) -> list[NodeFacts]:
        return self.stored

    async def probe_each(self, config: Config) -> AsyncIterator[NodeFacts]:
        for facts in list(self.found):
            while facts.node in self.held:
                await asyncio.sleep(0.005)
            yield facts

    def latest(self, config: Config) -> Calibration | None:
        return self.taken

    def latest_scaling(self, config: Config) -> Scaling | None:
        return self.scaled

    async def measure_scaling(
        self, config: Config, *, quick: bool = False, per_rank_batch: bool = False
    ) -> AsyncGenerator[CalibrationProgress | Scaling, None]:
        self.scalings.append((quick, per_rank_batch))
        try:
            for step in self.steps:
                assert not isinstance(step, Calibration)
                if isinstance(step, Scaling):
                    while step.complete and not self.measured.is_set():
                        await asyncio.sleep(0.005)
                    self.scaled = step
                yield step
        except asyncio.CancelledError:
            self.stopped += 1
            raise

    def predict(self, config: Config, calibration: Calibration | None) -> Prediction:
        return predict(config, calibration, NOW)

    async def measure(self, config: Config, *, quick: bool = False) -> AsyncIterator[CalibrationProgress | Calibration]:
        self.measurements.append(quick)
        try:
            for step in self.steps:
                assert not isinstance(step, Scaling)
                if isinstance(step, Calibration):
                    while not self.measured.is_set():
                        await asyncio.sleep(0.005)
                    self.taken = step
                yield step
        except asyncio.CancelledError:
            self.stopped += 1
            raise

    def topology(self, facts: Sequence[NodeFacts]) -> Topology:
        return topology(facts).model_copy(update={"setup": self.setup_commands})

    def network_plan(self, config: Config, facts: Sequence[NodeFacts]) -> NetworkPlan:
        return plan_network(config, facts, topology(facts))

    async def plan(self, config: Config, *, facts: Sequence[NodeFacts] | None = None) -> TrainingPlan:
        seen = {fact.node: fact for fact in facts or () if fact.problem is None}
        problems = {fact.node: fact.problem for fact in facts or () if fact.problem is not None}
        return make_plan(
            PlanInputs(
                config=config.model_copy(update={"job": whole_job(config.job)}),
                now=NOW,
                topology=topology(list(seen.values())),
                tools=Tools(python="/opt/mlx/bin/python", flightdeck="flightdeck"),
                facts=seen,
                problems=problems,
                network=self.network_plan(config, facts or ()),
                model=self.model,
                model_source="config.json of /srv/flightdeck/demo/model on local-0",
                examples=512,
                examples_source="counted in train.jsonl on local-0",
                calibration=self.taken,
                launching=Launching(mlx_launch_command="mlx.launch --hostfile hostfile.json -- python -m mlx_lm lora"),
            )
        )

    async def telemetry(self, config: Config) -> AsyncIterator[NodeTelemetry]:
        self.listeners += 1
        try:
            for value in self.values:
                yield value
            await asyncio.Event().wait()
        finally:
            self.listeners -= 1

    async def serve(self, run: str, *, divided: bool | None = None) -> ChatServer:
        if self.refusal is not None:
            raise self.refusal
        return ChatServer(f"{run}-serve", started=not self.served_already)

    async def served(self, server: str) -> None:
        while not self.serving.is_set():
            await asyncio.sleep(0.005)

    async def reply(
        self, server: str, messages: Sequence[Mapping[str, str]], *, model: str, max_tokens: int = 512
    ) -> AsyncIterator[ChatAnswer]:
        self.asked.append((model, [message["content"] for message in messages]))
        for piece in (*self.pieces, f"{model}\x1b[2J"):
            await self.served(server)
            if isinstance(piece, FlightDeckError):
                raise piece
            yield (answer := ChatAnswer(piece) if isinstance(piece, str) else piece)
            if answer.cut:
                return

    def exchanges(self, run: str, limit: int = 100) -> list[ChatExchange]:
        return self.kept

    def suggestions(self, run: str) -> list[str]:
        return ["tower to heron", "hold level", "climb and maintain"]

    def accept(self, digest: str) -> None: ...

    async def accept_host_key(self, offer: HostKeyOffer) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.accepted.append(offer)

    async def run_on(self, config: Config, node: str, command: str, *, timeout_s: float = 600.0) -> Completed:
        self.commands.append((node, command))
        while node in self.held:
            await asyncio.sleep(0.005)
        return self.completed

    def shell_argv(self, config: Config, node: str) -> list[str]:
        self.shells.append(node)
        return self.shell

    def setup_argv(self, config: Config, node: str, commands: Sequence[str]) -> list[str]:
        self.setup_commands = {other: lines for other, lines in self.setup_commands.items() if other != node}
        return ["/bin/sh", "-c", f"mkdir -p {self.home}; echo {node} >> {self.home / 'setup'}"]

    async def preflight(self, config: Config, *, skip: Iterable[str] = ()) -> AsyncIterator[CheckResult]:
        for result in self.check_results:
            yield result

    async def launch(self, config: Config, *, skip: Iterable[str] | Mapping[str, str] = ()) -> RunRecord:
        if self.refusal is not None:
            raise self.refusal
        self.skipped = dict(skip) if isinstance(skip, Mapping) else {}
        self.launched.append(config)
        self.snapshots = {**FakeEngine(self.home).add(running()).snapshots, **self.snapshots}
        return running().record

    async def abort(self, run: str, *, now: bool = False) -> AsyncIterator[StopProgress]:
        self.aborted.append((run, now))
        self.put(stopping())
        yield StopProgress("stop", ago(1))

    def tasks_of(self, run: str) -> list[RunRecord]:
        return [record for record in self.all() if record.source == run]

    async def weights(self, run: str) -> TrainedFile:
        if self.why_no_tasks is not None:
            raise InputError("no result", why=self.why_no_tasks)
        return self.snapshots[run].trained or TrainedFile("/srv/adapters.safetensors", 7, "local-0", "")

    async def start(self, run: str, request: TaskRequest) -> RunRecord:
        self.started.append((run, request))
        task = record(f"{run}-{request.kind}", task=request.kind, source=run, iteration=None, train_loss=None)
        self.snapshots = {**FakeEngine(self.home).add(replace(running(), record=task)).snapshots, **self.snapshots}
        return task

    async def repeat(self, run: str, settings: Mapping[str, Any], *, accept_changed: bool = False) -> RunRecord:
        if self.changed_inputs is not None and not accept_changed:
            raise InputsChanged("cannot be repeated as it was", why=self.changed_inputs)
        self.repeated.append((run, dict(settings)))
        return running().record

    def configuration(self, run: str) -> Config:
        config = configuration()
        return config.model_copy(update={"job": whole_job(config.job)})

    def differences(self, run: str, config: Config) -> list[str]:
        """From the one that was launched last."""
        return changed_keys(self.launched[-1], config) if self.launched else []

    def write_settings(self, config: Config, changes: Mapping[str, Any]) -> None:
        self.written.append(dict(changes))

    async def resume(self, run: str) -> RunRecord:
        self.resumed.append(run)
        return self.record(run)

    def publish(self, request: PublicationRequest) -> Publication:
        self.published.append((request.run, request.target, request.folder))
        return Publication(folder=request.folder, commands=("ollama create demo",))

    def to_publish(
        self, run: str, target: str, *, fused: bool = False, repository: str | None = None
    ) -> tuple[str, Path | None]:
        return "trained", None

    async def fetch(self, run: str, *, wanted: str = "trained") -> AsyncIterator[FetchProgress | Fetched]:
        yield FetchProgress(1_200_000, 4_100_000, 112e3)
        while run in self.held:
            await asyncio.sleep(0.005)
        if self.refusal is not None:
            raise self.refusal
        yield Fetched(self.home / run, ())


@dataclass
class FakeWatch:
    """Hands out whatever the engine holds for the run."""

    engine: FakeEngine
    run: str

    def poll(self) -> RunSnapshot:
        return self.engine.snapshots[self.run]


def write_logs(run: RunDir, snapshot: RunSnapshot) -> None:
    """The output of both ranks, line by line in turn, indexed as a run's own mirror does it; a failed run's ends with
    the first rank's complaint about the second's failure."""
    run.path.mkdir(parents=True, exist_ok=True)
    iteration = snapshot.record.iteration or 0
    both = [(rank, line) for lines in zip(*(log_lines(iteration, rank) for rank in range(2)), strict=True)
            for rank, line in enumerate(lines)]  # fmt: skip
    if snapshot.diagnosis is not None:
        both += [*((1, line) for line in TRACEBACK), (0, CONSEQUENCE)]
    mirror = Mirror(run, lambda gap: None, clock=lambda: NOW.timestamp() - 41)
    for rank in range(2):
        mirror.follow(rank, None, 0)
    for rank, line in both:
        with run.log(rank).open("ab") as file:
            file.write(f"{line}\n".encode())
        mirror.pump()
    mirror.close()
