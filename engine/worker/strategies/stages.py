"""The arithmetic of a pipeline: into how many micro-batches a batch goes, in which order a stage computes and
communicates, and how long it waits. Standard library alone: the engine plans with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Act = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward"]
_MICRO_BATCHES_PER_STAGE = 2


@dataclass(frozen=True)
class Step:
    """One thing that a stage does."""

    act: Act
    micro: int
    """The micro-batch, from 0."""


def bubble(stages: int, micro_batches: int) -> float:
    """The part of a step in which a stage of a 1F1B pipeline waits: (p-1)/(m+p-1), 0 to below 1. Source: Narayanan et
    al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters. Raises ValueError for counts below 1."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"stages and micro-batches must be at least 1: {stages}, {micro_batches}")
    return (stages - 1) / (micro_batches + stages - 1)


def micro_batches(rows: int, stages: int) -> int:
    """Into how many micro-batches a batch of `rows` goes: two for each stage, as far as there are rows. More would make
    the wait at its ends shorter ((p-1)/(m+p-1) of a step), and each matrix product smaller."""
    return max(1, min(rows, _MICRO_BATCHES_PER_STAGE * stages))


def schedule(stage: int, stages: int, micro: int, first_trained: int = 0) -> list[Step]:
    """What `stage` of `stages` does for `micro` micro-batches, in order: one forward, one backward (1F1B), so that a
    stage holds the activations of at most `stages - stage` micro-batches. Source: Narayanan et al. 2021, Efficient
    Large-Scale Language Model Training on GPU Clusters.

    Where a stage sends to a neighbour that sends to it, one of them receives first: so no message needs a buffer. The
    stages before `first_trained` have nothing to train, and go forward only.
    """
    warm = min(stages - stage - 1, micro)
    steps: list[Step] = []

    def both(send: Step, receive: Step) -> list[Step]:
        return [send, receive] if stage % 2 == 0 else [receive, send]

    for number in range(warm):
        steps += [Step("receive_forward", number), Step("forward", number), Step("send_forward", number)]
    for number in range(micro - warm):
        ahead = warm + number
        if number == 0:
            steps.append(Step("receive_forward", ahead))
        steps.append(Step("forward", ahead))
        steps += both(Step("send_forward", ahead), Step("receive_backward", number))
        steps.append(Step("backward", number))
        if ahead + 1 < micro:
            steps += both(Step("send_backward", number), Step("receive_forward", ahead + 1))
        else:
            steps.append(Step("send_backward", number))
    for number in range(micro - warm, micro):
        steps += [Step("receive_backward", number), Step("backward", number), Step("send_backward", number)]
    absent: set[Act] = set()
    if stage == 0:
        absent |= {"receive_forward", "send_backward"}
    if stage == stages - 1:
        absent |= {"send_forward", "receive_backward"}
    if stage < first_trained:
        absent |= {"receive_backward", "backward"}
    if stage <= first_trained:
        absent |= {"send_backward"}
    return [step for step in steps if step.act not in absent]
