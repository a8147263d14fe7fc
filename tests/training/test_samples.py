"""Answers while it trains: they change nothing of the training, are those of the weights as they are, and take their
share of the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate

from engine.protocol.events import EventWriter
from engine.protocol.job import Job, config_hash
from engine.trainer import samples
from engine.trainer.collective import Collective
from engine.trainer.model import encode_prompt, load_model, row_format
from engine.trainer.samples import Samples
from engine.trainer.strategies.pipeline import Pipeline
from engine.trainer.strategies.sharded import Sharded
from engine.training.data import DataLoader, Split
from engine.training.process import Control
from engine.training.reporting import Reporter
from tests.training.launching import launch
from tests.training.test_update import Trained, train
from tests.training.tiny import Tiny, make_job
from tests.training.together import together

PROMPTS = ["tower raven", "hold level runway report over climb"]
ASKED: dict[str, Any] = {"sample_prompts": PROMPTS, "sample_every": 3, "sample_tokens": 6}
LORA = {
    "fine_tune_type": "lora",
    "num_layers": -1,
    "grad_checkpoint": True,
    "learning_rate": 1e-2,
    "lora_parameters": {"rank": 4, "dropout": 0.3, "scale": 20.0},
}


def answers(events: list[dict[str, Any]]) -> dict[int, list[str]]:
    """By iteration, in the order of the prompts."""
    given: dict[int, list[str]] = {}
    for event in events:
        if event["event"] == "sample":
            given.setdefault(event["iteration"], []).append(event["text"])
    return given


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much time for answers as they take."""
    monkeypatch.setattr(samples, "SHARE", float("inf"))


@pytest.mark.parametrize("keys", [LORA, {"grad_accumulation_steps": 2, "learning_rate": 1e-2}], ids=["lora", "full"])
@pytest.mark.usefixtures("unlimited")
def test_a_training_that_answers_is_bit_for_bit_one_that_does_not(
    tiny: Tiny, tmp_path: Path, keys: dict[str, Any]
) -> None:
    keys = {**keys, "val_batches": -1, "steps_per_eval": 4}

    def trained(name: str, **asked: Any) -> tuple[Trained, list[Any]]:
        home = tmp_path / name
        home.mkdir()
        run = train(tiny, home, **keys, **asked)
        state: Any = mx.random.state
        return run, [value.tolist() for value in state]

    (plain, plain_state), (asked, asked_state) = trained("plain"), trained("asked", **ASKED)
    assert [step["loss"] for step in asked.of("step")] == [step["loss"] for step in plain.of("step")]
    assert [step["val_loss"] for step in asked.of("validation")] == [
        step["val_loss"] for step in plain.of("validation")
    ]
    theirs = plain.weights()
    assert all(mx.array_equal(value, theirs[name]).item() for name, value in asked.weights().items())
    assert asked_state == plain_state
    given = answers(asked.events)
    assert list(given) == [0, 3, 6, 8]
    model, tokenizer = load_model(make_job(tiny, tmp_path, **keys))
    assert given[0] == [generate(model, tokenizer, prompt, max_tokens=6) for prompt in PROMPTS]
    asked.model.eval()
    assert given[8] == [generate(asked.model, tokenizer, prompt, max_tokens=6) for prompt in PROMPTS] != given[0]
    assert [event["share"] is None for event in asked.of("sample")] == [True] * 2 + [False] * 6


def test_answers_that_would_take_more_than_their_share_are_put_off_but_for_the_first_and_the_last(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "SHARE", 0.0)
    trained = train(tiny, tmp_path, **ASKED)
    assert list(answers(trained.events)) == [0, 8]
    (warning,) = trained.of("warning")
    assert warning["message"].startswith("iteration 3: sample_prompts would have taken ")


def test_a_stop_is_honoured_between_two_tokens(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, tokens = Control(), list[int]()

    def going_on(self: Reporter) -> None:
        tokens.append(1)
        if len(tokens) == 4:
            control.stop.set()

    monkeypatch.setattr(Reporter, "going_on", going_on)
    trained = train(tiny, tmp_path, control, **{**ASKED, "sample_tokens": 100})
    assert (len(tokens), answers(trained.events)) == (4, {})
    assert trained.outcome is not None and (trained.outcome.stopped, trained.outcome.iteration) == (True, 1)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_a_divided_model_answers_as_the_whole_one(tiny: Tiny, tmp_path: Path, strategy: str, *, stopped: bool) -> None:
    job = make_job(tiny, tmp_path, strategy=strategy, **ASKED)

    def answer(collective: Collective) -> None:
        control = Control()
        if stopped and collective.rank == 1:
            control.stop.set()
        made = make_strategy(job, collective)
        reporter = Reporter(EventWriter(tmp_path / f"{collective.rank}.jsonl", collective.rank, 1))
        Samples(job, made, load_model(job)[1], control, reporter, raw=True).begin(0)
        assert made.model.training

    together(2, answer)
    lines = [(tmp_path / f"{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    events = [list(map(json.loads, own)) for own in lines]
    assert answers(events[1]) == {}
    model, tokenizer = load_model(make_job(tiny, tmp_path))
    whole = [generate(model, tokenizer, prompt, max_tokens=6) for prompt in PROMPTS]
    assert answers(events[0]) == ({} if stopped else {0: whole})


def make_strategy(job: Job, collective: Collective) -> Sharded | Pipeline:
    model, tokenizer = load_model(job)
    examples = Split(job, "train", row_format(job, tokenizer), lambda _: None)
    loader = DataLoader(examples, job, [1.0, 1.0], collective.rank, Reporter(EventWriter(None, 0, 1)))
    if job.strategy == "sharded":
        return Sharded(job, model, loader, collective)
    return Pipeline(job, model, loader, collective, ((0, 1), (1, 2)))


def test_a_prompt_for_chats_goes_through_the_template(tiny: Tiny, tmp_path: Path) -> None:
    job = make_job(tiny, tmp_path, data=str(tiny.chat), **ASKED)
    _, tokenizer = load_model(job)
    split = Split(job, "train", row_format(job, tokenizer), lambda _: None)
    assert split.form == "chat"
    message = [{"role": "user", "content": PROMPTS[0]}]
    template = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert template != PROMPTS[0]
    assert encode_prompt(tokenizer, PROMPTS[0], raw=False) == tokenizer.encode(template, add_special_tokens=False)
    assert encode_prompt(tokenizer, PROMPTS[0], raw=True) == tokenizer.encode(PROMPTS[0])


def test_what_is_asked_meanwhile_is_no_part_of_what_is_trained(tiny: Tiny) -> None:
    assert config_hash(tiny.job()) == config_hash(tiny.job(**ASKED))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "local", "sharded", "pipeline"])
def test_ranks_train_the_same_with_answers(tiny: Tiny, tmp_path: Path, strategy: str) -> None:
    """Over real rings, with answers as one rank gives them from the same base."""
    keys = {"strategy": strategy, "iters": 6}
    plain = launch(tmp_path / "plain", tiny.job(**keys), shares=(1.0, 1.0)).succeeded()
    asked = launch(tmp_path / "asked", tiny.job(**keys, **ASKED), shares=(1.0, 1.0)).succeeded()
    assert [asked.losses(rank) for rank in (0, 1)] == [plain.losses(rank) for rank in (0, 1)]
    theirs = plain.weights()
    assert all((value == theirs[name]).all() for name, value in asked.weights().items())
    given = answers(asked.events(0))
    assert {0, 6} <= given.keys() <= {0, 3, 6}
    model, tokenizer = load_model(make_job(tiny, tmp_path))
    assert given[0] == [generate(model, tokenizer, prompt, max_tokens=6) for prompt in PROMPTS]
    assert answers(asked.events(1)) == {}
    assert "generating" in [event["phase"] for event in asked.events(0, "phase")]
