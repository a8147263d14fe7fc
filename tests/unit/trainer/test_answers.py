"""lm-eval's requests, as mlx-lm's own connection to it scores them. lm-eval itself is there in tests/foreign."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from engine.protocol.task import Task
from engine.trainer import answers
from engine.training.result_tasks import LmEvalOptions

TOKENS = ["<s>", "a", "b"]
LOGITS = mx.array([[0.1, 0.9, 0.3], [0.7, 0.2, 1.5], [2.0, 0.4, 0.6]])
"""Those after each token, whatever was before it."""


@dataclass(frozen=True)
class Request:
    arguments: tuple[str, Any]

    @property
    def args(self) -> tuple[str, Any]:
        return self.arguments


class Bigrams:
    def make_cache(self) -> list[Any]:
        return []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return LOGITS[tokens]


class Tokenizer:
    bos_token = "<s>"

    def encode(self, text: str, **_: Any) -> list[int]:
        return [TOKENS.index(token) for token in re.findall("<s>|.", text)]


@pytest.fixture
def without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm needs a class to inherit from, and a decorator."""
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api.model", "lm_eval.api.registry")}
    vars(modules["lm_eval.api.model"])["LM"] = object
    vars(modules["lm_eval.api.registry"])["register_model"] = lambda name: lambda registered: registered
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("without_lm_eval")
@pytest.mark.parametrize(
    ("context", "rest", "pairs"), [("", "ab", [(0, 1), (1, 2)]), ("", "b", [(0, 2)]), ("a", "ba", [(1, 2), (2, 1)])]
)
def test_the_log_likelihood_is_that_of_the_continuation_alone(
    context: str, rest: str, pairs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = SimpleNamespace(going_on=lambda: None)
    process: Any = SimpleNamespace(spec=SimpleNamespace(task=vars(Task("lm_eval", "run"))), reporter=reporter)
    process.spec.task["options"] = {"tasks": ["any"]}
    generator = SimpleNamespace(model=Bigrams(), tokenizer=Tokenizer(), stopping=False, process=process)
    generator.loaded, generator.end = lambda *_: ["base"], lambda *_: None
    scores: list[tuple[float, bool]] = []
    monkeypatch.setattr(answers, "load", lambda *_: generator)
    request = Request((context, rest))
    monkeypatch.setattr(LmEvalOptions, "measure", lambda _, lm, *about: scores.extend(lm.loglikelihood([request])))
    collective: Any = None
    answers.do_lm_eval(process, collective)
    logarithms = LOGITS - mx.logsumexp(LOGITS, axis=-1, keepdims=True)
    assert [score for score, _ in scores] == [
        pytest.approx(sum(logarithms[before, after].item() for before, after in pairs), abs=1e-5)
    ]
