"""A node may be anybody's: what it says is taken in a known form, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.preflight import answers

MODEL: dict[str, Any] = {"kind": "llama", "bytes": 1, "shards": 1, "faults": [], "repository": None, "hashes": {}}


def test_texts_are_made_safe_and_short() -> None:
    hostile = "\x1b]0;title\x07model\u202egnp.\n" + "x" * 10_000
    said = answers.Model.model_validate(MODEL | {"kind": hostile, "hashes": {"a\x1b[2J.safetensors": "1 bytes"}})
    assert said.kind.startswith("modelgnp.")
    assert len(said.kind) <= 300
    assert list(said.hashes) == ["a.safetensors"]


@pytest.mark.parametrize("name", ["org/tiny", "org-1/tiny.v2"])
def test_a_repository_is_taken_by_an_allow_list(name: str) -> None:
    assert answers.Model.model_validate(MODEL | {"repository": name}).repository == name


@pytest.mark.parametrize("name", ["--token/x", "a/b; id", "a/$(id)", "a/b/c", "../..", "a/b\n"])
def test_a_repository_that_would_be_more_than_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        answers.Model.model_validate(MODEL | {"repository": name})


@pytest.mark.parametrize("pid", [0, 1, -9, "7; id"])
def test_a_pid_that_must_not_be_killed_is_refused(pid: object) -> None:
    with pytest.raises(ValidationError):
        answers.Ports.model_validate({"ports": [{"holder": "x", "pid": pid}]})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (answers.Problems, {"problems": [None] * 10_001}),
        (answers.Listening, {"listening": [70_000]}),
        (answers.Stale, {"stale": [{"pids": [], "command": "x"}]}),
        (answers.Held, {"held": False}),
        (answers.Model, {}),
        (answers.Program, {}),
    ],
)
def test_what_has_another_form_is_no_answer(kind: type[answers.Answer], said: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(said)
