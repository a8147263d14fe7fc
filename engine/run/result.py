"""The result of a run, from its journal and its metrics: the files that it left, its losses, and what it took. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import PurePosixPath
from typing import NamedTuple

from engine.models import RunState
from engine.run.events import SavedFiles
from engine.run.history import RunHistory
from engine.run.metrics import MetricsSeries
from engine.snapshots import Energy, ResultFile, RunResult, ValidationLoss

_WEIGHTS = re.compile(r"[0-9]+_adapters\.safetensors|best_adapters\.safetensors")
"""Fetched as the adapters.safetensors that mlx-lm loads beside adapter_config.json."""
_STATE_WEIGHTS = "weights."
"""Begins the name of the file of the trained weights in a saved state (engine.trainer.checkpoint.store)."""
_PART = re.compile(r"part[0-9]+")
_SavedPart = tuple[str, str, SavedFiles]
"""A part of a state: its node, and the SHA-256 of its manifest."""
StateParts = tuple[tuple[str, str, str], ...]
"""As TrainedFile.parts."""


class NewestWeights(NamedTuple):
    """The trained weights that were saved last: a file or a folder of a node, with its size in bytes; or the parts of a
    state, of which `node` and `path` are the first's."""

    node: str
    path: str
    size: int
    iteration: int
    parts: StateParts = ()


def run_result(history: RunHistory, series: MetricsSeries, now: datetime, *, any_part: bool = False) -> RunResult:
    """The result so far. `now`: where its last end is not known; `any_part`: each part of a state is enough."""
    training, validations = history.training, [ValidationLoss(*point) for point in series.val.points]
    first, last = validations[:1], validations[-1:]
    before_updates = training is not None and training.from_base and first and first[0].iteration == 0
    until = history.record.ended_at or now
    return RunResult(
        files=(*_weights(history), *_state_files(_newest_state(history, any_part=any_part))),
        first=first[0] if first else None,
        best=min(validations, key=lambda validation: validation.loss, default=None),
        last=last[0] if last else None,
        base=first[0].loss if before_updates else None,
        test_loss=series.test_loss,
        tokens=series.trained_tokens,
        learning_rate=series.learning_rate,
        seconds=sum(attempt.ran_s(until) for attempt in history.attempts) if history.attempts else None,
        energy=_energy(history, series.trained_tokens),
        versions=training.versions if training is not None else {},
        inputs=training.inputs if training is not None else {},
    )


def _energy(history: RunHistory, tokens: int | None) -> Energy | None:
    joules, seconds = (sum(getattr(event, name) for event in history.energy) for name in ("joules", "seconds"))
    nodes = tuple(dict.fromkeys(event.node for event in history.energy))
    return Energy(joules, seconds, nodes, joules / tokens * 1e6 if tokens else None) if nodes else None


def newest_weights(history: RunHistory, *, any_part: bool = False, saved_alone: bool = False) -> NewestWeights | None:
    """By themselves; or in the state of a run that ended before its time, with its parts (`any_part`: one is enough),
    unless `saved_alone`."""
    saves = [event for (_, best), event in history.weights.items() if not best]
    saved = max(saves, key=lambda event: event.at, default=None)
    states = [] if saved_alone else _newest_state(history, any_part=any_part)
    if states and (saved is None or states[0][2].iteration > saved.saved.iteration):
        files = [(name, size) for _, _, state in states for name, size, _ in state.files]
        # PyTorch's files have the weights and the optimizer's state in one.
        sizes = [size for name, size in files if name.startswith(_STATE_WEIGHTS)] or [size for _, size in files]
        parts = tuple((node, state.folder, manifest) for node, manifest, state in states)
        return NewestWeights(*parts[0][:2], sum(sizes), states[0][2].iteration, parts)
    if saved is None:
        return None
    sizes_of, iteration = {name: size for name, size, _ in saved.saved.files}, saved.saved.iteration
    # mlx-lm's adapters are a file, of which a folder may have several; all else is used as a whole.
    if (name := next((name for name in sizes_of if name.endswith("adapters.safetensors")), None)) is not None:
        return NewestWeights(saved.node, str(PurePosixPath(saved.saved.folder, name)), sizes_of[name], iteration)
    return NewestWeights(saved.node, saved.saved.folder, sum(sizes_of.values()), iteration)


def _weights(history: RunHistory) -> Iterator[ResultFile]:
    for (holds, best), event in history.weights.items():
        for file in _files(event.node, event.saved, holds, best=best):
            name = PurePosixPath(file.path).name
            yield replace(file, name="adapters.safetensors") if _WEIGHTS.fullmatch(name) else file


def _newest_state(history: RunHistory, *, any_part: bool) -> list[_SavedPart]:
    """The newest state of which every part was saved: of one copy of each, in order. `any_part`: one alone."""
    states: dict[tuple[str, ...], dict[int, _SavedPart]] = {}
    newest, preferred = dict[int, _SavedPart](), (0, 0, False, 0)
    for event in sorted((event for saved in history.states.values() for event in saved), key=lambda event: event.at):
        (place, _, author), saved = event.state.partition("@"), event.saved
        # A run that is complete has removed its emergency checkpoints.
        if saved is None or (author and history.record.state is RunState.SUCCEEDED):
            continue
        update, part = map(int, place.split("."))
        made = event.node, event.manifest, saved
        if any_part:
            # The ranks come to an update at different times. The first rank's is the one that all go on from.
            attempt = sum(attempt.status.began_at <= event.at for attempt in history.attempts)
            if (preference := (attempt, update, _answered_last(history, event.node), -part)) > preferred:
                newest, preferred = {part: made}, preference
            continue
        key = f"{update}", author, f"{saved.parts}"
        if part in states.get(key, {}):
            # A later attempt saves it anew.
            del states[key]
        parts = states.setdefault(key, {})
        parts[part] = made
        if len(parts) == saved.parts:
            newest = parts
    return [newest[part] for part in sorted(newest)]


def _answered_last(history: RunHistory, node: str) -> bool:
    """It took part in the last attempt, to the end of which its supervisor had a connection to it."""
    last = history.last_attempt
    link = last.condition(node) if last is not None else None
    return last is None or (node in last.plan.nodes and (link is None or link.condition == "connected"))


def _state_files(state: Iterable[_SavedPart]) -> Iterator[ResultFile]:
    for node, _, saved in state:
        folder = PurePosixPath(saved.folder)
        depth = 2 if _PART.fullmatch(folder.parent.name) else 1
        yield from _files(node, saved, "checkpoint", "/".join(folder.parts[-depth:]))


def _files(node: str, saved: SavedFiles, holds: str, folder: str = "", *, best: bool = False) -> Iterator[ResultFile]:
    for name, size, digest in saved.files:
        path, below = f"{saved.folder.rstrip('/')}/{name}", f"{folder}/{name}".lstrip("/")
        yield ResultFile(holds, best, saved.iteration, node, path, below, size, digest)
