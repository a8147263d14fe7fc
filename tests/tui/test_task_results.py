"""What a task reports, as lines: whatever a node sends, nothing but text for a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from engine.snapshots import ServedRequests
from engine.task_result import Answer, Evaluated, FuseChoice, Fused, Score, Served, TaskResult
from tests.tui import fake_engine
from tui.task_results import result_lines, serving_lines


def test_scores_of_base_and_trained_weights_stand_side_by_side() -> None:
    base = Score(variant="base", task="arc_easy", metric="acc", value=0.25, stderr=0.05)
    alone = Score(variant="adapter", task="arc_easy", metric="acc_norm", value=0.5)
    scores = [base, base.model_copy(update={"variant": "adapter", "value": 0.5}), alone]
    assert list(result_lines(scores)) == [
        "TASK      METRIC    BASE             TRAINED",
        "arc_easy  acc       0.2500 ± 0.0500  0.5000 ± 0.0500",
        "arc_easy  acc_norm  -                0.5000",
    ]


def test_losses_are_a_table() -> None:
    base = Evaluated(variant="base", split="test", loss=2.25, perplexity=9.4877, tokens=1234, seconds=65.0)
    assert list(result_lines([base, base.model_copy(update={"variant": "adapter", "loss": 1.0})])) == [
        "WEIGHTS  SPLIT  LOSS    PERPLEXITY  TOKENS  TOOK",
        "base     test   2.2500  9.488       1,234   1:05",
        "adapter  test   1.0000  9.488       1,234   1:05",
    ]
    diverged = base.model_copy(update={"variant": "adapter", "loss": None, "perplexity": None})
    assert "adapter  test   not finite" in list(result_lines([diverged]))[-1]


def test_a_fused_model_says_what_is_kept() -> None:
    fused = Fused(path="/f", bytes=2_000_000, kept=0.988, accepted=True)
    assert list(result_lines([fused])) == ["fused: /f (2.0 MB), kept 98.8% of the gain"]
    assert list(result_lines([fused.model_copy(update={"kept": None})])) == ["fused: /f (2.0 MB), no gain to keep"]


def test_a_refusal_names_the_ways_out_with_their_sizes() -> None:
    choices = FuseChoice(dequantize=True, bytes=3_000_000), FuseChoice(bits=8, bytes=1_000_000)
    refused = Fused(path="/f", bytes=1, kept=0.1, accepted=False, why="rounding", choices=choices)
    assert list(result_lines([refused])) == [
        "not fused: kept 10.0% of the gain: rounding",
        "  --dequantize  3.0 MB",
        "  --bits 8      1.0 MB",
    ]


def test_an_answer_keeps_the_line_ends_that_it_ends_with() -> None:
    answer = Answer(variant="base", prompt="Hi", text="a\r\n\n\n", tokens=3, prompt_tokens=1, tokens_per_second=1.0)
    assert Answer.model_validate_json(answer.model_dump_json()).text == answer.text == "a\n\n\n"


def test_an_answer_is_harmless_line_by_line() -> None:
    figures: Any = {"tokens": 2, "prompt_tokens": 1, "tokens_per_second": 3.25}
    answer = Answer(variant="adapter", prompt="Hi\x1b[2J", text="one\x1b[31m\ntwo", **figures)
    assert answer.prompt == "Hi"
    assert list(result_lines([answer])) == ["--- adapter · 2 tokens · 3.2 tok/s", "one", "two"]


@pytest.mark.parametrize("kind", ["evaluation", "fused", "answer", "else", None, ["list"]])
@pytest.mark.parametrize("value", [None, "text\x1b[2J", [1], {"a": 1}, float("nan"), True])
def test_what_is_no_result_is_not_taken_for_one(kind: Any, value: Any) -> None:
    names = ("variant", "split", "loss", "tokens", "seconds", "path", "bytes", "accepted", "prompt", "prompt_tokens")
    with pytest.raises(ValidationError):
        TypeAdapter(TaskResult).validate_python({**dict.fromkeys(names, value), "kind": kind})


def test_a_server_that_goes_on_says_what_it_has_answered_and_how_it_is_stopped() -> None:
    served = Served(address="http://127.0.0.1:8080/v1", model="job", token=False)
    begun = replace(fake_engine.running(), task_results=(served,))
    assert list(result_lines([served])) == ["job answers at http://127.0.0.1:8080/v1"]
    assert list(result_lines([served], ended=True)) == []
    assert list(serving_lines(begun, "ctrl+x stops it")) == ["no request yet; ctrl+x stops it"]
    ranks = (replace(begun.ranks[0], served=ServedRequests(1234, 56_789, 35.25)), *begun.ranks[1:])
    asked = replace(begun, ranks=ranks)
    text = "1,234 requests answered, 56,789 tokens, 35.2 tok/s"
    assert list(serving_lines(asked, "stop it")) == [f"{text}; stop it"]
    again = replace(asked, record=asked.record.model_copy(update={"attempts": 2}))
    assert list(serving_lines(again, "stop it")) == [f"{text} since it was restarted; stop it"]
    ended = replace(asked, record=fake_engine.succeeded().record)
    assert list(serving_lines(ended, "stop it")) == []
    assert list(serving_lines(fake_engine.running(), "stop it")) == []
