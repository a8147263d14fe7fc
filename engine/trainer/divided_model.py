"""A model divided over the ranks by layers, as mlx-lm's generation calls it on rank 0.

Rank 0 has the last layers, the norm and the head, so that the logits are where the token is chosen; the last rank has
the embeddings and the first layers. A round of all ranks is a message of rank 0 to all (what to do, and the tokens),
and the hidden states from each rank to the one below. Each rank has the caches of its own layers."""

from __future__ import annotations

import copy
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from engine.protocol.job import JobError
from engine.protocol.partition import LayerSplit, split_by_bytes
from engine.trainer.collective import Collective, all_gather_object
from engine.trainer.model import memory_mib
from engine.trainer.strategies.pipeline import MessageKind, MessageTag, StageMessages
from engine.trainer.strategies.sections import Section, check_splittable

_MESSAGE = 64
"""32-bit words of a message: whether a rank is asked to stop, operation, cache, argument, rows, length, tokens."""
_HEAD = 6
_REST_S = 0.05


class Operation(IntEnum):
    FORWARD = 1
    COPY_CACHE = 2
    """The argument is the cache to copy."""
    TRIM_CACHE = 3
    """By so many tokens."""
    DROP_CACHE = 4
    REPORT_PEAK = 5
    SELECT = 6
    """The base model (0), or what was trained (1)."""
    END = 7
    REST = 8
    """Nobody asks: sleep for _REST_S, where the next round would be waited for with a busy core."""


class DividedModel:
    """Every method called on rank 0 communicates with `follow` on the others, in the thread of the collective."""

    def __init__(self, model: nn.Module, collective: Collective, stopped: Callable[[], bool]) -> None:
        """`model`: whole, not evaluated; other ranks' layers never are. `stopped`: this rank is asked to stop. Raises
        JobError, PeerLost."""
        check_splittable(model, "pipeline")
        self.split = divide(model, all_gather_object(collective, memory_mib())[::-1])
        stage, last = collective.size - 1 - collective.rank, collective.size - 1
        self._layers = range(*self.split[stage])
        self.section = Section(model, *self.split[stage], first=stage == 0, last=stage == last)
        self.stopping = False
        """A rank is asked to stop."""
        self._collective, self._stopped = collective, stopped
        self._messages = StageMessages(collective)
        self._tag = MessageTag(MessageKind.HIDDEN, 0, 0)
        kinds = [_kind(cache) for cache in make_prompt_cache(self.section.model)]
        # An architecture makes its masks from the cache of its first layer of a kind, which may be another rank's: then
        # one of this rank's stands for it. All have the same offset; a kind that no layer here has is of no use here.
        alike = {kinds[layer]: layer for layer in reversed(self._layers)}
        self._places = [
            layer if layer in self._layers else alike.get(kind, self._layers.start) for layer, kind in enumerate(kinds)
        ]
        self._caches: dict[int, list[Any]] = {}
        """On other ranks, by the number of rank 0's."""
        self.numbers = itertools.count(1)
        """Those of rank 0's next caches."""
        self.waiting: list[list[int]] = []
        """Operation, cache and argument, for the other ranks' caches: before the next round. Added to by any thread."""

    def make_cache(self) -> list[Any]:
        """For mlx-lm's make_prompt_cache: this rank's layers' caches, and on rank 0 one for the other ranks'."""
        caches: list[Any] = make_prompt_cache(self.section.model)
        mine = [caches[layer] for layer in self._layers]
        if self._collective.rank > 0:
            return mine
        others = {_kind(cache): cache for layer, cache in enumerate(caches) if layer not in self._layers}
        return [*mine, PeersCache(self, list(others.values()))]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """On rank 0: the logits [rows, length, vocabulary] of `inputs` [rows, length], not evaluated. Raises PeerLost,
        GroupError."""
        *mine, peers = cache or self.make_cache()
        while self.waiting:
            self._exchange(self.waiting.pop(0))
        rows, length = inputs.shape
        tokens: Any = inputs.reshape(-1).tolist()
        head = [Operation.FORWARD, peers.number, 0, rows, length]
        self._exchange(head + (tokens if _HEAD + len(tokens) <= _MESSAGE else []))
        if _HEAD + len(tokens) > _MESSAGE:
            self._collective.all_sum(inputs.astype(mx.int32))
        peers.advance(length)
        return self._compute(inputs, mine)

    def end(self) -> None:
        """On rank 0: the others' `follow` returns. Raises PeerLost."""
        self._exchange([Operation.END])

    def rest(self) -> float:
        """On rank 0: let the others sleep; for how long, in seconds. Raises PeerLost."""
        self._exchange([Operation.REST])
        return _REST_S

    def peak_memory(self) -> list[int]:
        """On rank 0: each rank's so far, in bytes. Raises PeerLost."""
        self._exchange([Operation.REPORT_PEAK])
        return self._gather_peaks()

    def select(self, *, trained: bool) -> None:
        """On rank 0: the other ranks attach or detach their adapter before the next round."""
        self.waiting.append([Operation.SELECT, int(trained)])

    def follow(self, going_on: Callable[[], None], select: Callable[[bool], None] = lambda _: None) -> None:
        """On another rank: take part until rank 0 ends. `going_on` is called in each round; `select` attaches the
        adapter, or detaches it. Raises PeerLost, GroupError."""
        while True:
            operation, number, argument, rows, length, *tokens = self._exchange([])
            match operation:
                case Operation.FORWARD:
                    self._forward(number, rows, length, tokens)
                case Operation.COPY_CACHE:
                    if argument in self._caches:
                        self._caches[number] = copy.deepcopy(self._caches[argument])
                case Operation.TRIM_CACHE:
                    trim_prompt_cache(self._caches.get(number, []), argument)
                case Operation.DROP_CACHE:
                    self._caches.pop(number, None)
                case Operation.REPORT_PEAK:
                    self._gather_peaks()
                case Operation.SELECT:
                    select(bool(number))
                case Operation.REST:
                    time.sleep(_REST_S)
                case Operation.END:
                    self._caches.clear()
                    return
            going_on()

    def _forward(self, number: int, rows: int, length: int, tokens: list[int]) -> None:
        """On another rank: its layers' part of rank 0's call."""
        if number not in self._caches:
            self._caches[number] = self.make_cache()
        inputs = mx.array(tokens[: rows * length], mx.int32)
        if rows * length > len(tokens):
            inputs = self._collective.all_sum(mx.zeros((rows, length), mx.int32))
        hidden = self._compute(inputs.reshape(rows, length), self._caches[number])
        self._messages.send(self._collective.rank - 1, self._tag, hidden)
        self._messages.settle()
        if length > 1:
            mx.clear_cache()

    def _gather_peaks(self) -> list[int]:
        peaks: list[int] = all_gather_object(self._collective, mx.get_peak_memory())
        return peaks

    def _exchange(self, message: list[int]) -> list[int]:
        """Rank 0's `message`, on all ranks; that of the others is empty."""
        words = [int(self._stopped()), *message]
        total: Any = self._collective.all_sum(mx.array(words + [0] * (_MESSAGE - len(words)), mx.int32)).tolist()
        self.stopping |= total[0] > 0
        received: list[int] = total[1:]
        return received

    def _compute(self, inputs: mx.array, caches: Sequence[Any]) -> mx.array:
        self._tag = self._tag._replace(batch=(self._tag.batch + 1) % 2**31)
        hidden, (rows, length) = None, inputs.shape
        if not self.section.first:
            hidden = self._messages.receive(self._collective.rank + 1, self._tag, (rows, length))
        held = dict(zip(self._layers, caches, strict=True))
        return self.section(inputs, hidden, [held[place] for place in self._places])


class PeersCache:
    """On rank 0, the last of a prompt's caches: stands for those of the other ranks, which are changed with it."""

    state: tuple[()] = ()
    nbytes = 0

    def __init__(self, model: DividedModel, kinds: list[Any]) -> None:
        """`kinds`: an empty cache of each kind that the others have."""
        self._model, self._kinds = model, kinds
        self.number = next(model.numbers)
        weakref.finalize(self, model.waiting.append, [Operation.DROP_CACHE, self.number])

    def advance(self, tokens: int) -> None:
        for cache in self._kinds:
            cache.offset += tokens

    def is_trimmable(self) -> bool:
        return bool(can_trim_prompt_cache(self._kinds))

    def trim(self, tokens: int) -> int:
        self._model.waiting.append([Operation.TRIM_CACHE, self.number, tokens])
        trim_prompt_cache(self._kinds, tokens)
        return tokens

    def __deepcopy__(self, _: Any) -> PeersCache:
        duplicate = PeersCache(self._model, copy.deepcopy(self._kinds))
        self._model.waiting.append([Operation.COPY_CACHE, duplicate.number, self.number])
        return duplicate


def _kind(cache: Any) -> tuple[type, int | None]:
    return type(cache), getattr(cache, "max_size", None)


def divide(model: nn.Module, memory: Sequence[float]) -> LayerSplit:
    """Each stage's layers, by their bytes and the stages' `memory` (any unit). Raises JobError."""

    def size(part: nn.Module) -> int:
        return sum(value.nbytes for _, value in tree_flatten(part.parameters()))

    count = len(model.layers)
    first, last = Section(model, 0, 0, first=True, last=False), Section(model, count, count, first=False, last=True)
    try:
        return split_by_bytes([size(layer) for layer in model.layers], (size(first.model), size(last.model)), memory)
    except ValueError as error:
        raise JobError(f"the model cannot be divided over {len(memory)} ranks: {error}") from error
