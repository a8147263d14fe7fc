"""Known failure texts: each is known by one signature, which says in words of its own what it means."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.runs.diagnosis import findings
from engine.runs.signatures import BY_ID, SIGNATURES, Kind, Signature

RECORDED = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "failure_signatures.json"
WORDS_IN_COMMON = 6
"""As many words in a row may be the same by chance or because they are the field's."""

recorded_failures = pytest.mark.skipif(not RECORDED.exists(), reason="needs shared/fixtures beside the repository")


def recorded() -> list[dict[str, Any]]:
    return list(json.loads(RECORDED.read_text())) if RECORDED.exists() else []


def known(text: str) -> list[str]:
    return [signature.id for signature in SIGNATURES if re.search(signature.pattern, text)]


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_an_example_is_known_by_its_signature_and_by_no_other(signature: Signature) -> None:
    assert known(signature.example) == [signature.id]
    (found,) = findings([signature.example])
    assert (found.signature, found.kind) == (signature, signature.kind)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_a_signature_has_words_and_a_source(signature: Signature) -> None:
    groups = dict.fromkeys(re.compile(signature.pattern).groupindex, "x")
    assert signature.cause.format(**groups) and signature.fix.format(**groups) and signature.source
    assert len(signature.cause) < 200 and len(signature.fix) < 220, "it is to be read in a narrow pane"


def test_ids_are_unique() -> None:
    assert len(BY_ID) == len(SIGNATURES)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_nothing_but_digits_repeats_without_a_bound(signature: Signature) -> None:
    """Else a line could cost more than a constant times its length."""
    bare = re.sub(r"\\[^d]", "_", signature.pattern)
    assert re.findall(r"(?<!\\d)[*+]|\{\d*,\}", bare) == []


@recorded_failures
def test_every_recorded_failure_is_held() -> None:
    assert {failure["id"] for failure in recorded()} <= BY_ID.keys()
    assert len(recorded()) == 50


@recorded_failures
@pytest.mark.parametrize("failure", recorded(), ids=lambda failure: failure["id"])
def test_a_recorded_failure_is_known_by_the_signature_of_its_name_and_by_no_other(failure: dict[str, Any]) -> None:
    assert known(failure["sample"]) == [failure["id"]]
    (found,) = findings([failure["sample"]])
    assert (found.kind is Kind.NOISE) == (failure["severity"] != "fatal")
    assert "{" not in found.cause + (found.fix or "")


@recorded_failures
@pytest.mark.parametrize("failure", recorded(), ids=lambda failure: failure["id"])
def test_its_meaning_is_told_in_words_of_our_own(failure: dict[str, Any]) -> None:
    ours = _words(BY_ID[failure["id"]].cause + " . " + BY_ID[failure["id"]].fix)
    for theirs in (failure["cause"], failure["fix"]):
        words = _words(theirs)
        rows = (words[at : at + WORDS_IN_COMMON] for at in range(len(words) - WORDS_IN_COMMON + 1))
        assert not any(" ".join(row) in " ".join(ours) for row in rows)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", text.lower())
