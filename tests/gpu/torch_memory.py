"""The memory of a rank on the GPU: the peak of PyTorch's allocator beside the plan's estimate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from engine.plan.torch.memory import TorchMemory, TorchWorkload, torch_estimate
from tests.gpu.head import smi
from tests.gpu.part import Visit
from tests.gpu.torch_jobs import Trained, job_of, make_models, shape_of, side_by_side, train, write_data

WITHIN: Final = 0.10
DRY_WITHIN: Final = 0.15
"""Of resident memory on the CPU, as tests.bench.torch_memory."""
_FILLED: Final = 0.8
"""Of the free memory, by trainings at the same time: the allocator keeps more than its peak."""
Case = tuple[str, str]
"""Size, and lora or full."""
_SIZES: Final = ("0.1 B", "0.35 B", "0.5 B", "1 B")


def memory(visit: Visit) -> None:
    sizes, precision, batch, tokens = (_SIZES, "bf16", 4, 1_024) if not visit.dry else (("34 M",), "fp32", 2, 256)
    cases = [(size, kind) for size in sizes for kind in ("lora", "full")]
    planned = {case: _planned(case, precision, batch, tokens, on_gpu=not visit.dry) for case in cases}
    free = int(smi(visit, "memory.free")[0][0]) << 20 if not visit.dry else None
    for case in cases:
        if free is not None and planned[case].needed_bytes > 0.95 * free:
            gigabytes = planned[case].needed_bytes / 1e9
            visit.result(_name(case), "not measured", note=f"{gigabytes:.1f} GB are more than is free here")
    fitting = [case for case in cases if free is None or planned[case].needed_bytes <= 0.95 * free]
    models = make_models(visit, *dict.fromkeys(size for size, _ in fitting), dtype="bfloat16" if free else "float32")
    data = write_data(visit.scratch / "data", tokens + 8)
    keys: dict[str, Any] = {"precision": precision, "batch_size": batch, "max_seq_length": tokens + 1}
    keys |= {"iters": 4, "num_layers": -1, "save_every": 10_000}
    calls = [
        partial(
            train, visit, f"{size}-{kind}".replace(" ", ""), job_of(models[size], data, fine_tune_type=kind, **keys)
        )
        for size, kind in fitting
    ]
    call_of = dict(zip(fitting, calls, strict=True))
    for wave in waves({case: planned[case].needed_bytes for case in fitting}, free or 0):
        for case, trained in zip(wave, side_by_side([call_of[case] for case in wave]), strict=True):
            _report(visit, case, trained, planned[case])


def waves(needed: Mapping[Case, int], free: int) -> list[list[Case]]:
    """What is trained at the same time, the largest first: of needs that together leave a fifth free. One that needs
    more than that is alone."""
    made: list[list[Case]] = []
    for case in sorted(needed, key=lambda case: -needed[case]):
        fits = (wave for wave in made if sum(needed[other] for other in [*wave, case]) <= _FILLED * free)
        if (wave := next(fits, None)) is not None:
            wave.append(case)
        else:
            made.append([case])
    return made


def _name(case: Case) -> str:
    return f"{case[0]}, {case[1]}: the estimate of the peak against it"


def _planned(case: Case, precision: str, batch: int, tokens: int, *, on_gpu: bool) -> TorchMemory:
    size, kind = case
    workload = TorchWorkload(
        fine_tune_type="lora" if kind == "lora" else "full",
        precision=precision,
        batch=batch,
        sequence=tokens,
        on_gpu=on_gpu,
    )
    return torch_estimate(shape_of(size, "bfloat16" if on_gpu else "float32"), workload)


def _report(visit: Visit, case: Case, trained: Trained, planned: TorchMemory) -> None:
    if trained.error:
        visit.record(_name(case), trained.log)
        visit.result(_name(case), "no peak", ok=False, target=f"within {WITHIN:.0%}", note=trained.error[:300])
        return
    # The reserve is outside of the allocator on a GPU, and a part of the process on the CPU.
    estimate = planned.needed_bytes if visit.dry else planned.peak_bytes
    error, within = estimate / trained.peak_bytes - 1, DRY_WITHIN if visit.dry else WITHIN
    parts = {name: round(value / 1e6) for name, value in planned.model_dump().items() if name.endswith("_bytes")}
    note = f"{estimate / 1e6:,.0f} of {trained.peak_bytes / 1e6:,.0f} MB"
    visit.result(_name(case), f"{error:+.1%}", target=f"within {within:.0%}", ok=abs(error) <= within, note=note)
    visit.record(f"{_name(case)}: parts in MB", str(parts))
