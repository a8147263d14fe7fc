"""Losses on the GPU beside the CPU's of the same packages, and how attention's memory grows."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from tests.gpu.mlx_models import SMALL, Models, ask, training
from tests.gpu.mlx_training import Target, judged
from tests.gpu.part import Visit

_STEPS: Final = 20
_TOKENS: Final = 32
_BATCH: Final = 2
_RATE: Final = 3e-4
_NO_TF32: Final = {"MLX_ENABLE_TF32": "0"}
FORMS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {},
    "float32": {"torch_dtype": "float32"},
    "4-bit": {"quantization": {"group_size": 32, "bits": 4}},
}
LIMITS: Final = {"bfloat16": 1e-2, "float32": 1e-4, "4-bit": 1e-2}
"""Relative, of each loss."""
CASES: Final = (("bfloat16", "lora"), ("bfloat16", "full"), ("float32", "lora"), ("float32", "full"), ("4-bit", "lora"))


def losses(visit: Visit) -> None:
    """20 steps of each case on both devices, which work at the same time; float32 without TF32."""
    models = Models(visit)
    models.write({form: {**SMALL, **keys} for form, keys in FORMS.items()}, [_TOKENS])
    # On the CPU each form has a core.
    shares = [(visit.device, tuple(FORMS)), *(("cpu", (form,)) for form in FORMS)]
    with ThreadPoolExecutor(len(shares)) as pool:
        on_device, *on_cpu = pool.map(lambda share: _losses(visit, models, *share), shares)
    expected = {name: answer for answers in on_cpu for name, answer in answers.items()}
    for form, kind in CASES:
        name = f"{form}, {kind}"
        mine, cpu = on_device.get(name), expected.get(name)
        if not isinstance(mine, list) or not isinstance(cpu, list):
            visit.result(f"{name}: losses", f"{visit.device}: {_summary(mine)}; cpu: {_summary(cpu)}", ok=False)
            continue
        difference = max(abs(one / other - 1) for one, other in zip(mine, cpu, strict=True))
        target = Target(f"≤ {LIMITS[form]:g}", difference <= LIMITS[form])
        note = f"{cpu[0]:.4f} to {cpu[-1]:.4f}"
        judged(visit, f"{name}: {_STEPS} losses beside the CPU's", difference, target, note)


def _losses(visit: Visit, models: Models, device: str, forms: tuple[str, ...]) -> dict[str, list[float] | str]:
    """By case, the losses, or what it ended with."""
    runs = [
        training(f"{form}, {kind}", "ours", device, _job(models, form, kind), (_STEPS - 1, 0.0))
        for form, kind in CASES
        if form in forms
    ]
    asked = ask(visit, "trainings", {"folder": str(models.folder), "runs": runs}, env=_NO_TF32)
    if asked.failure is not None:
        visit.result(f"trainings on {device}, {', '.join(forms)}", asked.failure, ok=False)
    return {answer["name"]: answer.get("failure") or answer["losses"] for answer in asked.answers}


def _job(models: Models, form: str, kind: str) -> dict[str, Any]:
    return models.job(
        form, kind, _BATCH, _TOKENS, learning_rate=_RATE, steps_per_report=1, optimizer_precision="float32"
    )


def _summary(losses: list[float] | str | None) -> str:
    return losses if isinstance(losses, str) else "nothing" if losses is None else "all losses"


def attention(visit: Visit) -> None:
    """Scores that are kept need memory that grows with the square of the tokens; computed in tiles they need none."""
    request = {"head_dims": [64, 128, 256], "heads": 1 if visit.dry else 16}
    asked = ask(visit, "attention", request | {"lengths": (256, 512, 511) if visit.dry else (2_048, 4_096, 4_095)})
    if asked.failure is not None:
        visit.result("attention", asked.failure, ok=False)
    for head, answers in itertools.groupby(asked.answers, key=lambda answer: int(answer["head"])):
        measured = list(answers)
        peaks = [int(answer["peak_bytes"]) for answer in measured]
        if len(peaks) < 3:
            continue
        longest = measured[1]
        # Of a · tokens + b · tokens².
        quadratic = max(0.0, 2 * (peaks[1] - 2 * peaks[0]) / peaks[1])
        size = f"{peaks[1] / 1e6:.0f} MB beside {longest['input_bytes'] / 1e6:.0f} MB of inputs"
        note = f"{size} at {longest['length']:,} tokens, {longest['seconds'] * 1e3:.1f} ms"
        name, value = f"heads of {head}: the gradient's peak that grows with tokens²", f"{quadratic:.0%}"
        if head <= _FUSED_HEAD:
            judged(visit, name, value, Target("< 10%", quadratic < _KEPT_LIMIT), note)
        else:
            visit.result(name, value, note=note)
        # Why the trainer pads: cuDNN differentiates multiples of 128 alone.
        visit.result(f"heads of {head}: peak of one token less, over it", round(peaks[2] / peaks[1], 2), unit="×")


_FUSED_HEAD: Final = 128
"""The largest head of cuDNN's gradient of attention, as MLX 0.32.4 asks for it."""
_KEPT_LIMIT: Final = 0.1
