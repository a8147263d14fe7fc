"""Runs of the built-in fine-tuning by `flightdeck launch` on a machine with one GPU: launched, refused, out of memory,
killed, recovered and aborted.
"""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from engine.errors import plural
from engine.plan.torch.memory import TorchWorkload, torch_estimate
from engine.run.events import AttemptResumed
from tests.faults.local_runs import Run, kill_and_await
from tests.gpu.head import Launched, flightdeck, gpu_used_mib, launch, smi, write_config
from tests.gpu.part import Visit
from tests.gpu.torch_jobs import CLOSE, farthest, make_models, shape_of, side_by_side, write_data

FREED_MIB: Final = 64
"""What may be in use of the GPU more than before a run, once it is over."""


def job_table(model: Path, data: Path, **keys: Any) -> dict[str, Any]:
    """[job] of a built-in fine-tuning."""
    own = {"framework": "torch", "model": str(model), "data": str(data), "fine_tune_type": "lora"}
    return {**own, "batch_size": 4, "iters": 8, "steps_per_report": 1, "val_batches": 0, "save_every": 10_000, **keys}


def small_files(visit: Visit) -> tuple[Path, Path, int]:
    """(model, data, tokens)"""
    size, tokens = ("0.2 M", 64) if visit.dry else ("34 M", 512)
    return make_models(visit, size)[size], write_data(visit.scratch / "data", tokens + 8), tokens


def run_launch(visit: Visit) -> None:
    """One rank with NCCL, two with gloo, and two with NCCL, which are refused before anything starts."""
    model, data, tokens = small_files(visit)
    job = job_table(model, data, max_seq_length=tokens + 1)
    one = write_config(visit, "one", 1, job=job)
    two = write_config(visit, "two", 2, job=job)
    shared = write_config(visit, "shared", 2, job=job, cluster={"name": "gpu", "backend": "nccl"})
    launches = [
        partial(launch, visit, one, "--follow"),
        partial(launch, visit, two, "--follow"),
        partial(launch, visit, shared, "--follow"),
    ]
    first, second, third = side_by_side(launches, most=1 if visit.dry else 3)
    expected = ("gloo", "cpu", "fp32") if visit.dry else ("nccl", "cuda", "bf16")
    _launched(visit, "1 rank", first, expected)
    _launched(visit, "2 ranks, one GPU", second, ("gloo", "cpu", "fp32"))
    refused = third.done.code == 1 and not third.record.get("started_at")
    named = "nccl, which is planned, needs one for each" if visit.dry else "nccl is not possible"
    why = next((line for line in third.text.splitlines() if named in line), third.text[-300:])
    verdict = "refused before the launch" if refused else f"exit code {third.done.code}"
    visit.result("2 ranks of NCCL, one GPU", verdict, target="refused", ok=refused and named in why, note=why.strip())
    visit.record("2 ranks of NCCL, one GPU", third.text)


def _launched(visit: Visit, name: str, launched: Launched, wanted: tuple[str, str, str]) -> None:
    """`wanted`: its backend, device and precision."""
    record = launched.record
    state = str(record.get("state", f"exit code {launched.done.code}"))
    ok = (state, record.get("iteration")) == ("succeeded", 8)
    visit.result(f"{name}: the run", state, target="succeeded", ok=ok, note=str(record.get("cause") or "")[:300])
    if not record:
        visit.record(name, launched.text)
        return
    run = launched.run(visit)
    (start, *_) = [*_events(run, 0, "start"), {}]
    plan = json.loads(run.dir.training_plan.read_text()) if run.dir.training_plan.exists() else {}
    found = (record["backend"], str(start.get("device")).split(":")[0], plan.get("settings", {}).get("precision"))
    reasons = "; ".join(row["reason"] for row in plan.get("reasons", ()) if row["key"] == "torch.backend")
    visit.result(f"{name}: backend, device, precision", shown(found), target=shown(wanted), ok=found == wanted)
    if reasons:
        visit.result(f"{name}: why", reasons)
    checks = json.loads(run.dir.preflight.read_text())["checks"]
    failed = [check["name"] for check in checks if check["status"] == "fail"]
    visit.result(f"{name}: checks that fail", ", ".join(failed) or "none", target="none", ok=not failed)
    if wanted[1] == "cuda":
        (seen,) = re.findall(r"torch sees \d+ GPUs?", json.dumps(checks))[:1] or ["nothing of GPUs"]
        listed = f"torch sees {plural(len(smi(visit, 'uuid')), 'GPU')}"
        visit.result(f"{name}: the preflight", seen, target=listed, ok=seen == listed)
    warned = "; ".join(f"{check['name']}: {check['summary']}" for check in checks if check["status"] == "warn")
    visit.record(f"{name}: warnings of the preflight", warned)
    visit.record(f"{name}: log of rank 0", _log(run))


def shown(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))


def _events(run: Run, rank: int, kind: str) -> list[dict[str, Any]]:
    path = run.dir.events(rank)
    # The last line may still be under way.
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def _log(run: Run) -> str:
    path = run.dir.log(0)
    return path.read_text(errors="replace") if path.exists() else "rank 0 has not been started"


def _losses(run: Run, attempt: int) -> dict[int, float]:
    """By iteration, of rank 0."""
    steps = [event for event in _events(run, 0, "step") if event["attempt"] == attempt]
    return {event["iteration"]: event["loss"] for event in steps}


def _last(run: Run, attempt: int) -> int:
    """The iteration of its newest step; 0 before the first one."""
    return max(_losses(run, attempt), default=0)


_TOO_MUCH: Final = 1.5
"""Needed over what there is, of a job that does not fit."""
_DRY_LIMIT_KIB: Final = 6 << 20
"""Of a rank's address space, in place of the GPU's memory."""


def out_of_memory(visit: Visit) -> None:
    """A job that does not fit is refused, and fails by name with its fix where it is launched all the same."""
    size, tokens = ("0.2 M", 512) if visit.dry else ("0.1 B", 2_048)
    limit = int(smi(visit, "memory.total")[0][0]) << 20 if not visit.dry else _machine_bytes()
    batch = _too_large(size, tokens, limit, on_gpu=not visit.dry)
    model, data = make_models(visit, size)[size], write_data(visit.scratch / "data", tokens + 8, rows=batch)
    job = job_table(model, data, max_seq_length=tokens + 1, batch_size=batch, iters=2, grad_checkpoint=False)
    config = write_config(visit, "large", 1, job=job, recovery={"max_restarts": 0})
    before = gpu_used_mib(visit)
    # Less than the job needs: a machine that really runs out ends what the kernel chooses.
    under = ("sh", "-c", f'ulimit -v {_DRY_LIMIT_KIB}; exec "$@"', "sh") if visit.dry else ()
    launches = [
        partial(launch, visit, config, "--follow"),
        partial(launch, visit, config, "--follow", "--skip", "hardware_layer", under=under),
    ]
    refused, launched = side_by_side(launches, most=1 if visit.dry else 2)
    visit.record("a job that does not fit: refused", refused.text)
    lines = [line.strip() for line in refused.text.splitlines() if "hardware_layer" in line]
    ok = refused.done.code == 1 and not refused.record.get("started_at") and any(" of " in line for line in lines)
    note = (lines or refused.text.splitlines() or [""])[-1][:300]
    visit.result("a job that does not fit", "refused" if ok else "launched", target="refused", ok=ok, note=note)
    record = launched.record
    found = f"{record.get('state')}, {record.get('reason')}"
    visit.result("the same with --skip hardware_layer", found, target="failed, out_of_memory", ok=_is_named(record))
    visit.result("its cause", str(record.get("cause"))[:300])
    visit.result("its fix", str(record.get("fix"))[:300], ok=bool(record.get("fix")), target="named")
    if record:
        visit.record("out of memory", _log(launched.run(visit)))
    else:
        visit.record("out of memory: the launch", launched.text)
    _freed(visit, before)


def _is_named(record: Any) -> bool:
    return (record.get("state"), record.get("reason")) == ("failed", "out_of_memory")


def _machine_bytes() -> int:
    (kilobytes,) = [line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line]
    return int(kilobytes) * 1024


def _too_large(size: str, tokens: int, limit_bytes: int, *, on_gpu: bool) -> int:
    """Sequences that the plan does not fit into so many bytes."""
    batch, shape = 8, shape_of(size)
    precision = "bf16" if on_gpu else "fp32"
    while True:
        workload = TorchWorkload(precision=precision, batch=batch, sequence=tokens, on_gpu=on_gpu)
        if torch_estimate(shape, workload).needed_bytes > _TOO_MUCH * limit_bytes:
            return batch
        batch *= 2


def _freed(visit: Visit, before_mib: int) -> None:
    """The GPU's memory is as before, and nvidia-smi lists no process of ours."""
    if visit.dry:
        return
    deadline = time.monotonic() + 5.0
    while (after := gpu_used_mib(visit)) > before_mib + FREED_MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    ok = after <= before_mib + FREED_MIB
    target = f"<= {before_mib + FREED_MIB} MiB"
    visit.result("the GPU's memory in use afterwards", after, unit="MiB", target=target, ok=ok)
    visit.record("compute apps afterwards", json.dumps(smi(visit, "pid", "used_memory", of="compute-apps")))


_END_S: Final = 3.0
"""Left of a part's time when what is awaited has failed: all that tells of the run is then kept."""


def _is_between(run: Run, every: int) -> bool:
    """The first attempt has written a checkpoint, has made steps since, which are then repeated, and the next is not
    yet due. A GPU makes many steps while a checkpoint is written."""
    last = _last(run, 1)
    written = [event["iteration"] for event in _events(run, 0, "checkpoint") if event["phase"] == "committed"]
    return bool(written) and last > max(written) + 1 and 2 <= last % every <= every // 2


def recovery(visit: Visit) -> None:
    """A killed rank's run goes on from its checkpoint; an abort proves that nothing is left, on the GPU neither."""
    model, data, tokens = small_files(visit)
    before = gpu_used_mib(visit)
    job = job_table(model, data, max_seq_length=tokens + 1, iters=100_000, fine_tune_type="full")
    every = 10 if visit.dry else 50
    config = write_config(visit, "long", 1, job=job, checkpoint={"every": every})
    launched = launch(visit, config)
    if not launched.record:
        visit.record("the launch", launched.text)
        visit.result("the run", f"exit code {launched.done.code}", target="launched", ok=False)
        return
    run = launched.run(visit)
    run.wait(lambda: _is_between(run, every), visit.remaining_s - _END_S)
    used = gpu_used_mib(visit)
    killed = time.monotonic()
    kill_and_await(run.identity(0).trainer_pid)
    run.wait(lambda: bool(run.events_of(AttemptResumed)), visit.remaining_s - _END_S)
    recovered_s = time.monotonic() - killed
    (resumed,) = run.events_of(AttemptResumed)
    visit.result(
        "recovered from", resumed.resumed.source, target="checkpoint", ok=resumed.resumed.source == "checkpoint"
    )
    visit.result("from the kill to the first new step", recovered_s, unit="s")
    run.wait(lambda: _last(run, 2) > _last(run, 1) + 5, visit.remaining_s - _END_S)
    begun = time.monotonic()
    aborted = flightdeck(visit, "abort", run.dir.id, "--json")
    record = json.loads(aborted.output)
    first, second = _losses(run, 1), _losses(run, 2)
    again = first.keys() & second.keys()
    difference = farthest({step: first[step] for step in again}, {step: second[step] for step in again})
    # In bf16 on a GPU, whose gradient of attention adds in any order.
    within = CLOSE["fp32" if visit.dry else "bf16"]
    name, note = "losses of the repeated steps", f"{len(again)} steps"
    visit.result(name, difference, target=f"<= {within:g}", ok=difference <= within, note=note)
    proved = (record["state"], record["unconfirmed"], aborted.code) == ("aborted", [], 0)
    visit.result("abort", shown((record["state"], record["unconfirmed"])), target="aborted, []", ok=proved)
    visit.result("from the abort to its proof", time.monotonic() - begun, unit="s")
    left = [process.pid for process in run.left()]
    visit.result("processes left", len(left), target="0", ok=not left)
    if not visit.dry:
        visit.result("the GPU's memory in use while it trained", used, unit="MiB", note=f"{before} MiB before")
    _freed(visit, before)
