"""The loss in chunks of tokens is the loss of all logits, and so are its gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma2, llama
from mlx_lm.tuner.lora import LoRALinear

from engine.trainer.strategies import loss
from engine.trainer.strategies.loss import Rows, loss_sum
from engine.trainer.strategies.sections import Section
from engine.trainer.weights import scalar
from engine.training.data import Batch
from tests.training import kinds

VOCABULARY, LENGTH, CHUNK = 70, 23, 16
TOKENS = mx.arange(3 * LENGTH).reshape(3, LENGTH) * 7 % VOCABULARY
BOUNDS = mx.array([[5, 19], [1, LENGTH], [9, 9]])
"""Targets that begin and end within chunks, cross their borders, and none at all."""
FORMS = ("untied", "tied", "quantized", "lora", "trained head", "trained embeddings")


def made(form: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A Llama with its layers trained, as in mlx-lm's "full", and perhaps its head."""
    mx.random.seed(5)
    config = kinds.config("llama", tied=form in ("tied", "trained embeddings"))
    model: Any = llama.Model(llama.ModelArgs.from_dict({**config, "hidden_size": 64}))
    model.set_dtype(dtype)
    model.freeze()
    for layer in model.layers:
        layer.unfreeze()
    match form:
        case "quantized":
            model.lm_head = model.lm_head.to_quantized(group_size=32, bits=8)
            model.lm_head.freeze()
        case "lora":
            model.lm_head = LoRALinear.from_base(model.lm_head)
            model.lm_head.lora_b = mx.random.normal(model.lm_head.lora_b.shape) * 0.1
            model.lm_head.linear.freeze()
        case "trained head":
            model.lm_head.unfreeze()
        case "trained embeddings":
            model.model.embed_tokens.unfreeze()
    mx.eval(model.parameters())
    return model


def whole(model: nn.Module, scale: float = 1.0) -> tuple[mx.array, dict[str, mx.array]]:
    """Loss and gradients by MLX's own cross-entropy of all logits."""
    position = mx.arange(1, LENGTH)
    mask = mx.logical_and(position >= BOUNDS[:, :1], position < BOUNDS[:, 1:])

    def compute(model: nn.Module) -> mx.array:
        entropies = nn.losses.cross_entropy(model(TOKENS[:, :-1]), TOKENS[:, 1:])
        total: mx.array = (entropies * mask).astype(mx.float32).sum() * scale
        return total

    value, gradients = nn.value_and_grad(model, compute)(model)
    return value, dict(tree_flatten(gradients))


def ours(model: nn.Module, scale: float = 1.0) -> tuple[mx.array, dict[str, mx.array]]:
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    before = dict(tree_flatten(model.parameters()))
    value, gradients = nn.value_and_grad(model, loss_sum)(model, TOKENS, BOUNDS, mx.array(scale), trained=names)
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(after[name], value).item() for name, value in before.items()), "the model is as before"
    return value, dict(tree_flatten(gradients))


def off(found: dict[str, mx.array], expected: dict[str, mx.array]) -> float:
    """The largest distance of a gradient, relative to its norm."""
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
        name: (value.shape, value.dtype) for name, value in expected.items()
    }
    pairs = [(np.array(found[name].astype(mx.float32)), np.array(expected[name].astype(mx.float32))) for name in found]
    return max(float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The loss is computed in chunks of 16 tokens; the tokens of each piece of logits that is computed."""
    sizes: list[int] = []
    masked_sum = loss._masked_sum

    def counted(logits: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
        sizes.append(targets.size)
        return masked_sum(logits, targets, mask)

    monkeypatch.setattr(loss, "loss_tokens", lambda tokens, vocabulary: CHUNK)
    monkeypatch.setattr(loss, "_masked_sum", counted)
    return sizes


IN_CHUNKS = [16, 16, 16, 16, 2]


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_all_logits(chunks: list[int], form: str) -> None:
    model = made(form)
    expected, expected_gradients = whole(model)
    value, gradients = ours(model)
    assert chunks == IN_CHUNKS
    assert value.dtype == mx.float32 and value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert off(gradients, expected_gradients) < 1e-6
    assert loss_sum(model, TOKENS, BOUNDS, mx.array(1.0)).item() == pytest.approx(expected.item(), rel=1e-6)
    assert chunks == 2 * IN_CHUNKS


@pytest.mark.parametrize(("dtype", "scale"), [(mx.bfloat16, 1.0), (mx.float16, 2.0**-6)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("form", FORMS)
def test_in_16_bits_they_differ_by_its_rounding(chunks: list[int], form: str, dtype: mx.Dtype, scale: float) -> None:
    model = made(form, dtype)
    expected, expected_gradients = whole(model, scale)
    value, gradients = ours(model, scale)
    assert chunks == IN_CHUNKS
    assert value.item() == pytest.approx(expected.item(), rel=1e-2)
    assert off(gradients, expected_gradients) < 2e-2


@pytest.mark.parametrize("form", ["untied", "trained embeddings"])
def test_the_last_section_of_a_model_does_the_same(chunks: list[int], form: str) -> None:
    model = made(form)
    expected, expected_gradients = whole(model)
    rows = Rows(TOKENS, BOUNDS, 1.0)
    first, last = Section(model, 0, 2, first=True, last=False), Section(model, 2, 4, first=False, last=True)
    trained = [dict(tree_flatten(section.model.trainable_parameters())) for section in (first, last)]
    hidden = first.forward(rows, None)
    value, gradients, below = last.forward_backward(trained[1], rows, hidden, mx.array(1.0), below=True)
    assert below is not None
    _, early, _ = first.forward_backward(trained[0], rows, None, below, below=False)
    assert chunks == IN_CHUNKS
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    both = gradients | early
    for name in gradients.keys() & early.keys():
        both[name] = gradients[name] + early[name]
    assert off(both, expected_gradients) < 1e-6
    assert last.forward(rows, hidden).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_model_that_changes_its_heads_logits_keeps_them_whole(chunks: list[int]) -> None:
    """Gemma 2 caps them."""
    config = kinds.config("llama", tied=True) | {"model_type": "gemma2", "final_logit_softcapping": 0.5}
    model = gemma2.Model(gemma2.ModelArgs.from_dict(config))
    expected, expected_gradients = whole(model)
    value, gradients = ours(model)
    assert chunks == [TOKENS[:, 1:].size]
    assert value.item() == expected.item()
    assert off(gradients, expected_gradients) == 0


def test_a_small_vocabulary_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("trained embeddings")
    expected, expected_gradients = whole(model)
    value, gradients = ours(model)
    assert value.item() == expected.item()
    assert off(gradients, expected_gradients) == 0


def test_random_numbers_of_the_head_are_the_same_forward_and_backward(chunks: list[int]) -> None:
    """Dropout before LoRA's product: the gradient is that of the loss that was computed."""
    model: Any = made("lora")
    model.lm_head.dropout = nn.Dropout(0.5)
    model.train()
    names = ["lm_head.lora_b"]
    start = model.lm_head.lora_b

    def value(factor: float) -> float:
        mx.random.seed(3)
        model.lm_head.lora_b = start * factor
        return scalar(loss_sum(model, TOKENS, BOUNDS, mx.array(1.0), trained=names))

    mx.random.seed(3)
    _, gradients = ours(model)
    slope = (gradients["lm_head.lora_b"] * start).sum().item()
    assert slope == pytest.approx((value(1.01) - value(0.99)) / 0.02, rel=1e-2)


@pytest.mark.slow
def test_compiled_as_on_a_gpu_it_is_the_same(chunks: list[int]) -> None:
    model = made("trained embeddings")
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    expected, expected_gradients = whole(model)
    mx.enable_compile()

    def compute(tokens: mx.array, bounds: mx.array) -> Any:
        return nn.value_and_grad(model, loss_sum)(model, tokens, bounds, mx.array(1.0), trained=names)

    compiled = partial(mx.compile, inputs=[model.state], outputs=[model.state])(compute)
    for _ in range(2):
        value, gradients = compiled(TOKENS, BOUNDS)
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)
        assert off(dict(tree_flatten(gradients)), expected_gradients) < 1e-6
    assert chunks == IN_CHUNKS


@pytest.mark.slow
def test_the_logits_of_all_tokens_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By MLX's own count of bytes; in float32 a vocabulary of 20,000 and 1,024 tokens are 82 MB of logits."""
    config = kinds.config("llama", tied=False) | {"vocab_size": 20_000, "num_hidden_layers": 1}
    model: Any = llama.Model(llama.ModelArgs.from_dict({**config, "layer_types": ["full_attention"]}))
    model.freeze()
    model.layers[0].unfreeze()
    mx.eval(model.parameters())
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    tokens, bounds = mx.arange(1025)[None], mx.array([[1, 1025]])

    def peak(size: int, trained: list[str] | None) -> int:
        monkeypatch.setattr(loss, "loss_tokens", lambda tokens, vocabulary: size)
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        compute = nn.value_and_grad(model, loss_sum) if trained else loss_sum
        mx.eval(compute(model, tokens, bounds, mx.array(1.0), trained=trained))
        return mx.get_peak_memory() - held

    logits = 1024 * 20_000 * 4
    assert peak(1024, names) > 2.5 * logits
    assert peak(64, names) < 1.2 * logits
    assert peak(1024, None) > 1.5 * logits
    assert peak(64, None) < 1.2 * logits


@pytest.mark.parametrize(("inputs", "padded"), [(999, 999), (1000, 1024), (1024, 1024), (1100, 1152), (2047, 2048)])
def test_on_cuda_long_inputs_are_padded_to_what_cudnn_differentiates(
    inputs: int, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(inputs + 1, dtype=np.int32)[None] % VOCABULARY
    batch = Batch(tokens, np.asarray([[3, inputs + 1]], np.int32), inputs - 2)
    plain = Rows.of(batch)
    monkeypatch.setattr(loss, "on_cuda", lambda: True)
    rows = Rows.of(batch)
    assert (plain.tokens.shape, rows.tokens.shape) == ((1, inputs + 1), (1, padded + 1))
    assert np.array_equal(np.asarray(rows.tokens)[:, : inputs + 1], tokens)
    if inputs == 1000:
        model = made("untied")
        assert scalar(loss_sum(model, *rows.inputs)) == pytest.approx(scalar(loss_sum(model, *plain.inputs)), rel=1e-5)
