"""Ranges of layers as they are written, and the order in which stages compute and communicate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.partition import check_split, micro_batches, parse_split, schedule


def test_ranges_are_read_as_they_are_written() -> None:
    assert parse_split("0-8,8-36") == ((0, 8), (8, 36))
    assert parse_split(" 0-1, 1-2 ,2-4") == ((0, 1), (1, 2), (2, 4))


@pytest.mark.parametrize(
    "text", ["", "0-8", "0-8;8-36", "1-8,8-36", "0-8,9-36", "0-8,7-36", "0-0,0-4", "0-8,8-8", "8-0"]
)
def test_an_invalid_split_is_refused(text: str) -> None:
    if text == "0-8":
        with pytest.raises(ValueError, match="1 ranges for 2 ranks"):
            check_split(parse_split(text), 8, 2)
        return
    with pytest.raises(ValueError, match=r"range of layers|does not continue"):
        parse_split(text)


def test_a_division_of_another_model_is_refused() -> None:
    check_split(parse_split("0-8,8-36"), 36, 2)
    with pytest.raises(ValueError, match="ends at layer 36, and the model has 32"):
        check_split(parse_split("0-8,8-36"), 32, 2)


def test_a_batch_goes_into_two_micro_batches_for_each_stage() -> None:
    assert [micro_batches(rows, 2) for rows in (1, 3, 4, 64)] == [1, 3, 4, 4]


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 8))
def test_no_stage_waits_for_ever_and_each_holds_few_micro_batches(stages: int, micro: int, untrained: int) -> None:
    """Sends and receives that block until the other side does its part: the worst that a backend may do."""
    first_trained = min(untrained, stages)
    left = [schedule(stage, stages, micro, first_trained) for stage in range(stages)]
    forward: list[list[int]] = [[] for _ in left]
    backward: list[list[int]] = [[] for _ in left]
    while any(left):
        moved = False
        for stage, steps in enumerate(left):
            if not steps:
                continue
            step = steps[0]
            if step.act in ("forward", "backward"):
                (forward if step.act == "forward" else backward)[stage].append(step.micro)
                if stage >= first_trained:
                    assert len(forward[stage]) - len(backward[stage]) <= stages - stage
                steps.pop(0)
                moved = True
            elif step.act.startswith("send"):
                peer = stage + (1 if step.act == "send_forward" else -1)
                waiting = left[peer][:1]
                if waiting and waiting[0].act == step.act.replace("send", "receive"):
                    # In the order in which they were sent: nothing else tells messages apart.
                    assert waiting[0].micro == step.micro
                    steps.pop(0)
                    left[peer].pop(0)
                    moved = True
        assert moved, [steps[:1] for steps in left]
    for stage in range(stages):
        assert forward[stage] == list(range(micro))
        assert backward[stage] == (list(range(micro)) if stage >= first_trained else [])
