"""The updater with each form of the optimizer's state: beside float32, saved and restored, in pieces and at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.job import ELEMENTWISE, MOMENT_BLOCK, MOMENTS, OPTIMIZER_PRECISIONS, Job, state_bytes
from engine.trainer import optimizer
from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.optimizer import Updater
from engine.trainer.optimizer_state import compensated
from engine.trainer.weights import scalar
from tests.training.states import WINDOW, origin

FORMS = list(product(OPTIMIZER_PRECISIONS, MOMENTS))
OPTIMIZERS = ("adam", "adamw", "muon", "sgd", "adafactor")
CONFIG: dict[str, Any] = {"sgd": {"momentum": 0.9}, "adafactor": {"beta_1": 0.9}}
DIVISOR = 10.0

Gradients = dict[str, mx.array]


class Layers(nn.Module):  # type: ignore[misc]  # mlx has no types for it
    """Matrices, biases whose size is no whole number of blocks, and one layer that is not trained."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = [nn.Linear(width, width) for _ in range(layers)]
        self.layers[0].freeze()


def make(
    form: tuple[str, str],
    kind: str = "adamw",
    dtype: mx.Dtype = mx.bfloat16,
    layers: int = 3,
    width: int = 40,
    **keys: Any,
) -> tuple[Updater, nn.Module]:
    home, elements = Path(), keys.pop("elements", None)
    mx.random.seed(1)
    model = Layers(layers, width)
    model.set_dtype(dtype)
    precision, moments = form
    job = Job(
        *(home, home, home, home),
        **{"optimizer": kind, "optimizer_config": CONFIG, "learning_rate": 1e-3, **keys},
        optimizer_precision=precision,
        moments=moments,
    )
    updater = Updater(job, model, elements)
    mx.eval(updater.arrays)
    return updater, model


def gradients(model: nn.Module, update: int) -> Gradients:
    mx.random.seed(100 + update)
    found = {name: mx.random.normal(value.shape) for name, value in tree_flatten(model.trainable_parameters())}
    mx.eval(found)
    return found


def steps(updater: Updater, model: nn.Module, updates: range) -> None:
    for update in updates:
        updater.update([gradients(model, update)], DIVISOR)


def weights(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.trainable_parameters()))


def assert_same(one: Any, other: Any) -> None:
    mine, theirs = dict(tree_flatten(one)), dict(tree_flatten(other))
    assert mine.keys() == theirs.keys()
    differing = [
        name
        for name, value in mine.items()
        if value.dtype != theirs[name].dtype or not mx.array_equal(value, theirs[name], equal_nan=True).item()
    ]
    assert differing == []


def exact(updater: Updater) -> dict[str, mx.array]:
    """The weights as precisely as they are kept."""
    state = updater.state()
    return {
        name: compensated(value, remainder)
        if (remainder := state["optimizer"].get(f"{name}:compensation")) is not None
        else value.astype(mx.float32)
        for name, value in state["weights"].items()
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_state_goes_on_bit_by_bit(tmp_path: Path, form: tuple[str, str], kind: str) -> None:
    """Through the files of a checkpoint, into another model."""
    updater, model = make(form, kind)
    steps(updater, model, range(2))
    checkpoint = store.write(tmp_path, Snapshot(2, 2, WINDOW, updater.state()), origin())
    stored = store.load(checkpoint)
    assert_same(stored, updater.state())
    steps(updater, model, range(2, 4))

    again, other = make(form, kind)
    steps(again, other, range(7, 8))
    again.restore(stored)
    steps(again, other, range(2, 4))
    assert_same(updater.state(), again.state())
    assert_same(weights(model), weights(other))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_kahan_keeps_what_float32_masters_keep(kind: str, dtype: mx.Dtype) -> None:
    """Bit for bit: with float32 moments only the place of the bits differs, and float16 here stays in its range."""
    masters, model = make(("float32", "float32"), kind, dtype)
    kahan, other = make(("kahan", "float32"), kind, dtype)
    steps(masters, model, range(3))
    steps(kahan, other, range(3))
    found, expected = exact(kahan), exact(masters)
    for name, value in weights(model).items():
        assert scalar(mx.abs(found[name] - expected[name]).max()) <= 2.0**-30
        if dtype == mx.bfloat16:
            assert mx.array_equal(found[name], expected[name]).item()
        assert scalar(mx.abs(value - weights(other)[name]).max().astype(mx.float32)) <= 2.0**-8


@pytest.mark.parametrize("form", [form for form in FORMS if form != ("parameter", "float32")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_step_of_each_form_is_float32s_but_for_its_rounding(form: tuple[str, str], kind: str) -> None:
    """The first step: moments begin at zero, so that their form does not matter yet."""
    before = exact(make(form, kind, learning_rate=1e-2)[0])
    reference, model = make(("float32", "float32"), kind, learning_rate=1e-2)
    updater, other = make(form, kind, learning_rate=1e-2)
    steps(reference, model, range(1))
    steps(updater, other, range(1))
    for name, value in exact(updater).items():
        spacing = mx.maximum(mx.abs(before[name]), mx.abs(value)) * 2.0**-7 + 1e-6
        assert mx.all(mx.abs(value - exact(reference)[name]) <= spacing).item()
        if form[0] != "parameter":
            assert not mx.array_equal(value, before[name]).item()


@pytest.mark.parametrize("form", [("parameter", "float32"), ("float32", "float32")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_plain_forms_are_mlxs_own_optimizer(form: tuple[str, str], kind: str) -> None:
    updater, model = make(form, kind)
    stock = optimizer._OPTIMIZERS[kind](learning_rate=1e-3, **CONFIG.get(kind, {}))
    own = dict(updater.masters)
    for update in range(3):
        mean = {name: (value / DIVISOR).astype(own[name].dtype) for name, value in gradients(model, update).items()}
        own = stock.apply_gradients(mean, own)
    steps(updater, model, range(3))
    assert_same(updater.masters, own)
    assert_same(weights(model), {name: value.astype(mx.bfloat16) for name, value in own.items()})


@pytest.mark.parametrize("form", FORMS)
def test_the_state_has_the_bytes_that_a_plan_counts_on(form: tuple[str, str]) -> None:
    """Widths that are whole blocks."""
    updater, model = make(form, width=64)
    elements = sum(value.size for value in weights(model).values())
    kept = sum(value.nbytes for value in updater.masters.values()) + sum(
        value.nbytes for name, value in updater.state()["optimizer"].items() if ":" in name
    )
    if form[0] != "float32":
        kept -= 2 * elements
    assert kept == state_bytes(*form, 2) * elements


def test_weights_of_float32_are_never_kept_twice() -> None:
    updater, model = make(("kahan", "8bit"), dtype=mx.float32)
    steps(updater, model, range(2))
    assert not any(name.endswith("compensation") for name in updater.state()["optimizer"])
    assert_same(updater.masters, weights(model))


def test_factored_moments_stay_float32() -> None:
    state = make(("kahan", "8bit"), "adafactor")[0].state()["optimizer"]
    assert {value.dtype for name, value in state.items() if "_row" in name or "_col" in name} == {mx.float32}
    assert state["layers.1.weight:exp_avg"].dtype == mx.int8


@pytest.mark.parametrize("form", FORMS)
def test_pieces_and_parts_make_the_same_step(form: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, model = make(form)
    norm = whole.update([gradients(model, 1)], DIVISOR)
    monkeypatch.setattr(optimizer, "update_elements", lambda elements: 1)
    monkeypatch.setattr(optimizer, "ELEMENTWISE", ())
    parts, other = make(form)
    assert parts.update([gradients(model, 1)], DIVISOR) == pytest.approx(norm, rel=1e-6)
    pieces, third = make(form)
    pieces.update(({name: value} for name, value in reversed(gradients(model, 1).items())), DIVISOR)
    for updater, copied in ((parts, other), (pieces, third)):
        assert_same(whole.state(), updater.state())
        assert_same(weights(model), weights(copied))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_a_large_parameter_is_updated_in_slices(
    form: tuple[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of them shorter; the same but for what is rounded at random."""
    whole, model = make(form, kind, learning_rate=1e-2)
    before = exact(whole)
    monkeypatch.setattr(optimizer, "update_elements", lambda elements: 3 * MOMENT_BLOCK)
    slices, other = make(form, kind, learning_rate=1e-2)
    assert slices.needs_slices is (form not in (("parameter", "float32"), ("float32", "float32")))
    taken: list[str] = []
    original = Updater._advance_in_slices

    def noted(updater: Updater, name: str, *rest: Any) -> Any:
        taken.append(name)
        return original(updater, name, *rest)

    monkeypatch.setattr(Updater, "_advance_in_slices", noted)
    for update in range(2):
        found = gradients(model, update)
        norm = whole.update([found], DIVISOR)
        assert slices.update([found], DIVISOR) == pytest.approx(norm, rel=1e-6)
    assert slices.fits(whole.state())
    assert sorted(taken) == ["layers.1.weight"] * 2 + ["layers.2.weight"] * 2
    if form[0] != "stochastic" and form[1] == "float32":
        assert_same(whole.state(), slices.state())
        assert_same(weights(model), weights(other))
    for name, weight in exact(whole).items():
        moved, apart = (scalar(mx.abs(weight - each).mean()) for each in (before[name], exact(slices)[name]))
        assert apart < moved / 5


@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_have_a_parameter_in_common_update_it_alike(
    form: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others each of them has."""
    monkeypatch.setattr(optimizer, "update_elements", lambda elements: elements // (20 * MOMENT_BLOCK) * MOMENT_BLOCK)
    few, model = make(form, layers=2, elements=4000)
    many, other = make(form, layers=6, elements=4000)
    found = gradients(other, 0)
    few.update([{name: found[name] for name in weights(model)}], DIVISOR)
    many.update([found], DIVISOR)
    assert_same(weights(model), {name: weights(other)[name] for name in weights(model)})
    assert_same(few.state(), few.own_part(many.state()))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(norm: float) -> None:
    updater, model = make(FORMS[0])
    steps(updater, model, range(1))
    before, own = updater.state(), weights(model)
    assert updater.update([gradients(model, 1)], DIVISOR, norm) == pytest.approx(norm, nan_ok=True)
    assert_same(updater.state(), before)
    assert_same(weights(model), own)


@pytest.mark.parametrize("form", FORMS)
def test_a_lazy_step_is_the_same(form: tuple[str, str]) -> None:
    eager, model = make(form, max_grad_norm=0.5)
    lazy, other = make(form, max_grad_norm=0.5)
    for update in range(2):
        found = gradients(model, update)
        square = lazy.apply({name: value / DIVISOR for name, value in found.items()})
        mx.eval(square, lazy.arrays, other.parameters())
        norm = math.sqrt(scalar(square))
        assert eager.update([found], DIVISOR, norm) == norm > 0.5
    assert_same(eager.state(), lazy.state())
    assert_same(weights(model), weights(other))


@pytest.mark.slow
@pytest.mark.parametrize("form", [("float32", "float32"), ("kahan", "8bit"), ("stochastic", "bfloat16")])
def test_compiled_as_on_a_gpu_the_step_is_the_same(form: tuple[str, str]) -> None:
    """Alone, and within a function that is compiled as a whole. On the CPU this builds kernels for some seconds."""
    plain, model = make(form)
    steps(plain, model, range(2))
    mx.enable_compile()
    compiled, other = make(form)
    steps(compiled, other, range(2))
    inside, third = make(form)
    state = [third.state, inside.arrays]
    function = partial(mx.compile, inputs=state, outputs=state)(inside.apply)
    for update in range(2):
        means = {name: value / DIVISOR for name, value in gradients(third, update).items()}
        mx.eval(function(means), state)
    mx.disable_compile()
    for updater, trained in ((compiled, other), (inside, third)):
        assert_same(weights(trained), {name: value.astype(mx.bfloat16) for name, value in updater.masters.items()})
        assert updater.state()["optimizer"]["step"].item() == 2
        for name, value in exact(plain).items():
            # A fused multiplication and addition rounds once: a stochastic rounding may take the other neighbour.
            difference = mx.abs(exact(updater)[name] - value)
            assert scalar(difference.max()) <= 2.0**-9 and scalar(difference.mean()) <= 1e-5


@pytest.mark.parametrize(
    ("saved", "key"),
    [
        (("float32", "float32"), "optimizer_precision"),
        (("parameter", "float32"), "optimizer_precision"),
        (("kahan", "bfloat16"), "moments"),
        (("kahan", "float32"), "moments"),
        (("stochastic", "8bit"), "optimizer_precision"),
    ],
)
def test_a_state_of_another_form_is_refused_by_its_key(saved: tuple[str, str], key: str) -> None:
    state = make(saved)[0].state()
    updater, _ = make(("kahan", "8bit"))
    before = updater.state()
    with pytest.raises(ValueError, match=f"^it was saved with another {key}: .*$") as caught:
        updater.restore(state)
    assert "\n" not in str(caught.value)
    assert not updater.fits(state) and updater.fits(before)
    assert_same(updater.state(), before)


@pytest.mark.parametrize(
    ("form", "most"), [(("parameter", "float32"), 0.3), (("float32", "float32"), 0.5), (("kahan", "8bit"), 0.9)]
)
@pytest.mark.parametrize(("layers", "width"), [(129, 256), (33, 512)], ids=["whole", "slices"])
def test_an_update_holds_one_part_at_a_time(form: tuple[str, str], most: float, layers: int, width: int) -> None:
    """Bytes per trained element above the state, with gradients that are computed as they are asked for: a part, here
    of 1/128 of the elements, takes up to 20, 26 and 82 for each of its own. A parameter of 1/32 of them is updated in
    four slices, beside its gradient and its new state: 8, 16 and 9 for each of its own."""
    updater, model = make(form, layers=layers, width=width)
    if width == 512:
        most += {"parameter": 8, "float32": 16, "kahan": 9}[form[0]] / 32
    elements = sum(value.size for value in weights(model).values())
    shapes = {name: value.shape for name, value in weights(model).items()}

    def pieces() -> Iterator[Gradients]:
        for name, shape in shapes.items():
            yield {name: mx.full(shape, 0.5, mx.bfloat16)}

    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    updater.update(pieces(), DIVISOR)
    assert mx.get_peak_memory() - before < most * elements
    assert mx.get_active_memory() - before < 0.01 * elements
