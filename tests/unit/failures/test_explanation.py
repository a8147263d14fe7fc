"""The lines that a program printed explain its end, or nothing is known."""

from __future__ import annotations

import time

import pytest

from engine.failures.explanation import explain
from tests.unit.run.test_failure_cause import LAUNCHER, PEER_LOST, RAISED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RuntimeError: [ring] Couldn't bind socket (error: 98)", "the port is in use (error 98)"),
        ("RuntimeError: [ring] Couldn't connect (error: 61)", "it was refused (error 61)"),
        ("sh: 4: exec: /no/such/python: not found", "/no/such/python does not exist"),
        ("/bin/bash: line 1: /no/such/python: No such file or directory", "/no/such/python does not exist"),
        ("OSError: [Errno 28] No space left on device", "the disk was full"),
        (
            "Dataset must have at least batch_size=128 examples but only has 64.",
            "64 examples, fewer than the batch of 128",
        ),
        ("ModuleNotFoundError: No module named 'mlx_lm'", "mlx_lm is not installed"),
        (RAISED, "ValueError: boom"),
        (PEER_LOST, "a neighbouring rank went away"),
    ],
)
def test_a_known_text_is_explained(text: str, words: str) -> None:
    message = explain(text.split("\n"))
    assert message is not None
    assert words in message.cause


@pytest.mark.parametrize(
    "text", ["", "Iter 5: Train loss 5.8", "[ring] Attempt 0 waiting 1000 ms (error: 111 )", LAUNCHER]
)
def test_what_healthy_runs_say_too_explains_nothing(text: str) -> None:
    assert explain(text.split("\n")) is None


def test_a_log_of_very_many_workers_costs_no_more_than_another() -> None:
    """Else each worker's lines would be searched for each signature."""
    lines = [f"[rank {number}] step 1" for number in range(20_000)]
    begun = time.process_time()
    assert explain([*lines, "[rank 7] ValueError: boom"]) is not None
    assert time.process_time() - begun < 5
