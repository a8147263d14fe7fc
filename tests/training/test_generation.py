"""Answers by one rank, and by a model divided over several: the tokens of stock mlx-lm, with adapter and without."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache
from mlx_lm.tuner.dora import DoRALinear

from engine.protocol.attempt import STOP
from engine.protocol.exit_codes import TrainerExit
from engine.protocol.job import JobError
from engine.trainer.answers import Adapter
from engine.trainer.collective import Collective
from engine.trainer.divided_model import DividedModel, divide
from engine.trainer.model import load_model
from engine.trainer.variants import load_tensors
from engine.training.process import Control
from tests.training.generation_cases import (
    LARGE,
    PROMPTS,
    Answered,
    Made,
    Trained,
    case,
    make_trained,
    read,
    run,
    stock,
)
from tests.training.generation_program import answer
from tests.training.launching import Launched, launch
from tests.training.tiny import Tiny, make_job
from tests.training.together import together
from tests.waiting import wait_until

LLAMA = Made("llama", config={"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3})
"""On two ranks, each has layers of both kinds of attention, of which the model's first are the first rank's."""
MATRIX = {
    "llama": LLAMA,
    "llama tied": Made("llama", tied=True),
    "llama dora": Made("llama", tuning="dora"),
    "llama full": Made("llama", tuning="full"),
    "llama quantized": Made("llama", bits=4),
    "qwen3": Made("qwen3"),
    "qwen3 tied": Made("qwen3", tied=True),
    "qwen3_moe": Made("qwen3_moe"),
    "qwen3_moe quantized": Made("qwen3_moe", bits=8, config={"hidden_size": 64, "moe_intermediate_size": 32}),
    "mixtral": Made("mixtral"),
    "ministral3": Made("ministral3"),
    "mistral3": Made("mistral3"),
    "qwen2 tied": Made("qwen2", tied=True),
    "smollm3": Made("smollm3"),
}


@pytest.fixture(scope="module")
def make(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Made], Trained]:
    return lambda made: make_trained(tiny, tmp_path_factory.mktemp("trained"), made)


@pytest.fixture(scope="module")
def llama(make: Callable[[Made], Trained]) -> Trained:
    return make(LLAMA)


def answers(
    directory: Path, described: dict[str, Any], ranks: int, controls: dict[int, Control] | None = None
) -> Answered:
    """By ranks that are threads."""
    if ranks == 1:
        answer(described, Collective("ring", 1, 0), directory, (controls or {}).get(0))
    else:
        together(ranks, lambda group: answer(described, group, directory, (controls or {}).get(group.rank)))
    return read(directory, described["name"], ranks)


@pytest.mark.parametrize(("name", "ranks"), [("llama", 1), ("llama", 2), ("ministral3", 4), ("qwen3_moe", 2)])
def test_answers_are_those_of_stock_mlx_lm(
    name: str, ranks: int, make: Callable[[Made], Trained], tmp_path: Path
) -> None:
    """With four ranks, none has a layer of each kind of attention, of which the masks and positions are made."""
    trained = make(MATRIX[name])
    answered = answers(tmp_path, case("a", trained, max_tokens=24), ranks)
    expected = stock(trained, 24)
    assert answered.tokens == expected.tokens and expected.texts[:2] != expected.texts[2:]
    assert [result["text"] for result in answered.results] == expected.texts
    assert [(result["variant"], result["prompt"]) for result in answered.results] == [
        (variant, prompt) for variant in ("base", "adapter") for prompt in PROMPTS
    ]
    assert {(result["tokens"], result["finish"]) for result in answered.results} == {(24, "length")}
    assert all(len(result["rank_peak_memory_bytes"]) == ranks for result in answered.results)
    assert [events[-1]["completed"] for events in answered.events] == [True] * ranks
    phases = [event["phase"] for event in answered.events[-1] if event["event"] == "phase"]
    assert phases == ["loading", "generating"] * 2


def test_what_is_drawn_at_random_depends_on_the_seed_alone(llama: Trained, tmp_path: Path) -> None:
    drawn = []
    for number, (ranks, seed) in enumerate([(1, 3), (2, 3), (1, 4)]):
        options = {"max_tokens": 12, "temperature": 1.5, "top_p": 0.9, "variants": ["adapter"], "seed": seed}
        drawn.append(answers(tmp_path, case(str(number), llama, **options), ranks).tokens)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != stock(llama, 12).tokens[2]


def test_a_prompt_is_a_conversation_in_the_models_template_unless_it_is_raw(llama: Trained, tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "tower"}, {"role": "assistant", "content": "raven"}]
    tokenizer = load(str(llama.model))[1]
    for name, prompt, raw, text in (
        ("message", "tower", False, "user: tower\nassistant: "),
        ("conversation", conversation, False, "user: tower\nassistant: raven\nassistant: "),
        ("raw", "tower", True, "tower"),
    ):
        described = case(name, llama, prompts=[prompt], raw=raw, variants=["base"], max_tokens=2)
        (result,) = answers(tmp_path, described, 1).results
        assert result["prompt_tokens"] == len(tokenizer.encode(text)), name


class StopAfter(Control):
    """Asks to stop in the `count`-th time that it is asked about it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stop = _Counting(count)


class _Counting(threading.Event):
    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_of_any_rank_ends_the_answer_on_all_between_two_tokens(
    rank: int, llama: Trained, tmp_path: Path
) -> None:
    answered = answers(tmp_path, case("a", llama, max_tokens=200), 2, {rank: StopAfter(9)})
    (result,) = answered.results
    assert result["finish"] == "stopped" and 0 < result["tokens"] < 12
    assert answered.tokens == stock(llama, result["tokens"]).tokens[:1]
    assert [(events[-1]["stopped"], events[-1]["completed"]) for events in answered.events] == [(True, False)] * 2


@pytest.mark.parametrize(("kind", "trimmed"), [("qwen3", True), ("llama", False)])
def test_caches_of_prompts_are_copied_and_trimmed_on_all_ranks(
    kind: str, trimmed: bool, make: Callable[[Made], Trained], tmp_path: Path
) -> None:
    """As mlx-lm's server keeps them: of two prompts that begin alike, the second one's beginning is not computed again,
    and a copy goes on by itself. A window that has been left cannot be trimmed."""
    trained = make(Made(kind))
    prompt = [5, 6, 7, 8, 9, 10]

    def tokens(model: Any, rest: list[int], cache: Any) -> list[int]:
        steps = generate_step(mx.array(rest), model, prompt_cache=cache, max_tokens=6)
        return [int(token) for token, _ in steps]

    def ask(model: Any) -> list[Any]:
        kept = LRUPromptCache()
        cache = make_prompt_cache(model)
        first = tokens(model, prompt[:3], cache)
        kept.insert_cache("model", prompt[:3] + first, cache)
        second, rest = kept.fetch_nearest_cache("model", prompt)
        answers = [first, len(rest), tokens(model, rest, second or make_prompt_cache(model))]
        duplicate = copy.deepcopy(cache)
        return [*answers, can_trim_prompt_cache(cache), tokens(model, [4], duplicate), tokens(model, [4], cache)]

    def divided(group: Collective) -> Any:
        model, _ = load_model(make_job(tiny_job(trained), tmp_path, strategy="pipeline"))
        model.eval()
        part = DividedModel(model, group, lambda: False)
        Adapter(part.section.model)
        if group.rank > 0:
            return part.follow(lambda: None)
        answered = ask(part)
        part.end()
        return answered

    expected = ask(load(str(trained.model))[0])
    assert together(2, divided)[0] == expected
    assert expected[1] == (3 if trimmed else 6) and expected[3] is trimmed


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("fuse", [False, True])
def test_an_adapter_is_fused_where_the_base_is_not_quantized_or_can_be_taken_off(
    fuse: bool, bits: int | None, make: Callable[[Made], Trained], tmp_path: Path
) -> None:
    """Of the quantized model, the layers whose inputs are no multiple of the group's size are not."""
    trained, tokens = make(Made("llama", bits=bits)), mx.array([[5, 6, 7]])
    model, _ = load_model(make_job(tiny_job(trained), tmp_path, strategy="pipeline"))
    adapter = Adapter(model)
    base = load(str(trained.model))[0](tokens)
    expected = load(str(trained.model), adapter_path=str(trained.adapter))[0](tokens)
    assert mx.array_equal(model(tokens), base).item()
    adapter.load([load_tensors(trained.adapter / "adapters.safetensors")], fuse=fuse)
    assert mx.allclose(model(tokens), expected, atol=1e-4).item()
    left = {name.split(".")[-2] for name, _ in tree_flatten(model.parameters()) if name.endswith("lora_a")}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert left == (every if not fuse else every - {"down_proj"} if bits else set())
    if not fuse:
        adapter.detach()
        assert mx.array_equal(model(tokens), base).item()
        adapter.attach()
        assert mx.allclose(model(tokens), expected, atol=1e-4).item()


def tiny_job(trained: Trained) -> Any:
    """Stands for a Tiny: the job of the model."""

    class Own:
        def job(self, **keys: Any) -> dict[str, Any]:
            return trained.job | keys

    return Own()


def test_a_fused_layer_of_dora_is_in_the_type_of_its_base() -> None:
    base = nn.Linear(8, 8)
    base.set_dtype(mx.bfloat16)
    part = nn.Sequential(DoRALinear.from_base(base, r=2))
    assert part.layers[0].fuse().weight.dtype == mx.float32
    Adapter(part).load([], fuse=True)
    assert part.layers[0].weight.dtype == mx.bfloat16


def test_what_cannot_be_is_refused_by_name(llama: Trained, tmp_path: Path) -> None:
    model, _ = load_model(make_job(tiny_job(llama), tmp_path, strategy="pipeline"))
    with pytest.raises(JobError, match="cannot be divided over 7 ranks: 6 layers are too few for 7 stages"):
        divide(model, [1.0] * 7)
    described = case("a", llama)
    with pytest.raises(JobError, match="not divided over ranks with nccl"):
        answers(tmp_path, described | {"backend": "nccl"}, 2)
    described["task"]["weights"] = None
    with pytest.raises(JobError, match="the run has saved no weights"):
        answers(tmp_path, described, 1)
    described["task"]["weights"] = str(llama.model / "model.safetensors")
    with pytest.raises(JobError, match=r"the weights .*tensors are none of the job's"):
        answers(tmp_path, described, 1)


def start(directory: Path, trained: Trained, ranks: int, **options: Any) -> Launched:
    """By mlx.launch, start.sh and keepers."""
    described = case("a", trained, **options)
    fields = {"task": described["task"]}
    return launch(directory, described["job"], shares=(1.0,) * ranks, spec_fields=fields)


@pytest.mark.slow
def test_two_ranks_answer_under_their_keepers(llama: Trained, tmp_path: Path) -> None:
    ran = start(tmp_path, llama, 2, prompts=PROMPTS[:1], variants=["adapter"], max_tokens=8).succeeded()
    (result,) = ran.events(kind="result")
    assert result["text"] == stock(llama, 8).texts[2]
    assert f"adapter: {PROMPTS[0]}\n{result['text']}\n" in ran.files.log(0).read_bytes().decode(errors="replace")
    assert ran.events(1, "result") == [] and ran.events(1, "end")[0]["completed"]


@pytest.mark.slow
def test_a_stop_and_a_lost_peer_end_all_ranks(llama: Trained, tmp_path: Path) -> None:
    stopped = start(tmp_path / "stopped", llama, 2, max_tokens=100_000)
    wait_until(lambda: "generating" in [event.get("phase") for event in stopped.events(1)])
    stopped.send_to(1, STOP)
    stopped.succeeded()
    assert [stopped.events(rank, "end")[0]["stopped"] for rank in (0, 1)] == [True, True]
    (result,) = stopped.events(kind="result")
    assert result["finish"] == "stopped"
    killed = start(tmp_path / "killed", llama, 2, max_tokens=100_000)
    wait_until(lambda: "generating" in [event.get("phase") for event in killed.events(0)])
    killed.kill(1)
    assert killed.ended()[0].code == TrainerExit.PEER_LOST
    assert killed.events(kind="failure")[0]["error_type"] == "PeerLost"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MATRIX)
def test_two_hundred_tokens_of_every_architecture(
    name: str, ranks: int, make: Callable[[Made], Trained], tmp_path: Path
) -> None:
    """Four ranks that share two cores take their time: they answer the longer prompt, with the adapter."""
    trained = make(MATRIX[name])
    fewer: dict[str, Any] = {"prompts": PROMPTS[1:], "variants": ["adapter"]} if ranks == 4 else {}
    answered = run(tmp_path / "ring", [case("a", trained, max_tokens=200, **fewer)], ranks)["a"]
    assert answered.tokens == stock(trained, 200).tokens[-1 if fewer else 0 :]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LARGE)
def test_a_rank_never_holds_more_than_its_part(
    name: str, ranks: int, make: Callable[[Made], Trained], tmp_path: Path
) -> None:
    """Loading, fusing and answering."""
    trained = make(LARGE[name])
    whole = (trained.model / "model.safetensors").stat().st_size
    answered = run(tmp_path / "ring", [case("a", trained, prompts=PROMPTS[:1], max_tokens=4)], ranks)["a"]
    shares = [round(peak * ranks / whole, 3) for peak in answered.results[-1]["rank_peak_memory_bytes"]]
    print(f"of a model of {whole / 2**20:.0f} MiB, each of {ranks} ranks has held {shares} of a share")
    assert max(shares) <= 1.15
