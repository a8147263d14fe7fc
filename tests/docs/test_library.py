"""The page of the library: its examples run, and every exported function has one."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import engine
from tests.docs.generate import ROOT

PAGE = ROOT / "docs" / "library.md"


def test_its_examples_give_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("name", engine.__all__)
def test_every_function_is_in_an_example(name: str) -> None:
    examples = doctest.DocTestParser().get_examples(PAGE.read_text(encoding="utf-8"))
    assert name == "ConsistencyMetrics" or any(f"{name}(" in example.source for example in examples)
