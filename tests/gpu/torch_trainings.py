"""Trainings on the GPU beside the same jobs on the CPU: each precision, and each way to divide a training."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.gpu.part import Visit
from tests.gpu.torch_jobs import CLOSE, Trained, farthest, job_of, make_models, side_by_side, train, write_data

_OVERFLOWED: Final = "float16 overflowed"
_HAS_DEEPSPEED: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"


def small_job(visit: Visit, **keys: Any) -> dict[str, Any]:
    """A job so small that the CPU is soon through with it, too. Its model and data are made with the first one."""
    size, tokens, iters = ("0.2 M", 64, 6) if visit.dry else ("4 M", 128, 12)
    model, data = visit.scratch / f"model-{size.replace(' ', '')}", visit.scratch / "data"
    if not data.exists():
        make_models(visit, size, dtype="float32")
        write_data(data, tokens + 8)
    common = {"batch_size": 4, "iters": iters, "max_seq_length": tokens + 1, "learning_rate": 5e-4, "num_layers": -1}
    return job_of(model, data, **{**common, **keys})


def precision(visit: Visit) -> None:
    """bf16, fp16 and fp32, LoRA and full: the losses are those of the same job on the CPU."""
    cases = [(kind, of) for of in ("fp32", "bf16") for kind in ("full", "lora")]
    if visit.dry:
        cases = [("full", "fp32"), ("lora", "bf16")]
    jobs = {case: small_job(visit, fine_tune_type=case[0], precision=case[1]) for case in cases}
    scaled = {kind: small_job(visit, fine_tune_type=kind, precision="fp16") for kind in ("full", "lora")}
    calls = [
        partial(train, visit, f"{kind}-{of}-{place}", job, on_cpu=place == "cpu")
        for (kind, of), job in jobs.items()
        for place in ("device", "cpu")
    ]
    calls += [partial(train, visit, f"{kind}-fp16", job) for kind, job in list(scaled.items())[: 1 if visit.dry else 2]]
    done = iter(side_by_side(calls))
    for kind, of in cases:
        here, on_cpu = next(done), next(done)
        compare(visit, f"{kind}, {of}: losses against the CPU's", here, on_cpu, CLOSE[of])
        if not visit.dry:
            on_gpu = str(here.start.get("device", "")).startswith("cuda")
            visit.result(f"{kind}, {of}: device", str(here.start.get("device")), target="cuda", ok=on_gpu)
    for kind, trained in zip(scaled, done, strict=False):
        _scaled(visit, kind, trained)


def compare(visit: Visit, name: str, here: Trained, there: Trained, within: float) -> None:
    """A figure: the largest difference of two trainings' losses. A training that failed is one that missed."""
    difference = farthest(here.losses, there.losses)
    error = here.error or there.error
    if error:
        visit.record(name, here.log + there.log)
    falling = bool(here.losses) and here.losses[max(here.losses)] < here.losses[min(here.losses)]
    note = error[:300] or f"{len(here.losses)} steps, the loss {'falls' if falling else 'does not fall'}"
    ok = difference <= within and not error and falling
    visit.result(name, difference, target=f"<= {within:g}", ok=ok, note=note)


def _scaled(visit: Visit, kind: str, trained: Trained) -> None:
    """fp16: the loss is finite and falls, and the scaler skips few steps. On the CPU it is refused by name."""
    if visit.dry:
        refused = "precision = 'fp16'" in trained.error
        visit.result(f"{kind}, fp16", "refused on the CPU", target="refused", ok=refused, note=trained.error[:200])
        return
    skipped = sum(_OVERFLOWED in warning for warning in trained.warnings)
    losses = list(trained.losses.values())
    ok = not trained.error and all(map(math.isfinite, losses)) and len(losses) > skipped and losses[-1] < losses[0]
    if trained.error:
        visit.record(f"{kind}, fp16", trained.log)
    falls = f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else trained.error[:200]
    visit.result(f"{kind}, fp16 with scaling: the loss", falls, target="finite, falls", ok=ok)
    visit.result(f"{kind}, fp16 with scaling: updates that the scaler skipped", skipped, note=f"of {len(losses)}")


_NOT_BY_GLOO: Final = re.compile(r"[^\n]*(?:not support|unsupported|[Nn]o backend type|not implemented)[^\n]*")
"""What PyTorch says of a collective that gloo has for the CPU alone."""
_SHARED: Final = "tests.gpu.torch_shared"
_DIVISIONS: Final[Mapping[str, dict[str, Any]]] = {
    "DDP": {"strategy": "ddp"},
    "FSDP2 full": {"strategy": "fsdp", "sharding": "full"},
    "FSDP2 grad_op": {"strategy": "fsdp", "sharding": "grad_op"},
    "ZeRO-2": {"strategy": "deepspeed", "zero_stage": 2},
}


def division(visit: Visit) -> None:
    """DDP and FSDP2: two ranks on one GPU, by gloo, and one by NCCL, have the losses of one rank on the CPU."""
    cases = [(name, 2) for name in ("DDP", "FSDP2 full", "FSDP2 grad_op")]
    if visit.dry:
        cases = cases[:2]
    else:
        deepspeed = visit.call([visit.python, "-c", _HAS_DEEPSPEED], limit_s=10.0).code == 0
        cases += [(name, 1) for name in ("DDP", "FSDP2 full", *(["ZeRO-2"] if deepspeed else []))]
        if not deepspeed:
            visit.result("ZeRO-2", "left out", note="DeepSpeed is not installed here")
    jobs = {name: small_job(visit, fine_tune_type="full", **keys) for name, keys in _DIVISIONS.items()}
    calls = [partial(train, visit, "reference", jobs["DDP"], on_cpu=True)]
    for name, ranks in cases:
        program = _SHARED if ranks > 1 else "engine.torch_trainer.main"
        calls.append(partial(train, visit, _folder(name, ranks), jobs[name], ranks=ranks, program=program))
    reference, *trained = side_by_side(calls, most=1 if visit.dry else 16)
    where = "on the CPU" if visit.dry else "on one GPU"
    for (name, ranks), here in zip(cases, trained, strict=True):
        label = f"{name}, {f'2 ranks by gloo {where}' if ranks > 1 else '1 rank by NCCL'}: losses against 1 on the CPU"
        if ranks > 1 and name != "DDP" and (missing := _NOT_BY_GLOO.search(here.error)):
            visit.record(label, here.log)
            visit.result(label, "gloo cannot", note=f"{missing[0][:200]}: FSDP2 on a GPU needs NCCL")
            continue
        compare(visit, label, here, reference, CLOSE["fp32"])
        divided = ", ".join(here.start.get("partitioned") or []) or "nothing"
        visit.result(f"{name}, {ranks} {'ranks' if ranks > 1 else 'rank'}: divided", divided)


def _folder(name: str, ranks: int) -> str:
    return str(Path(f"{name.replace(' ', '-')}-{ranks}"))
