"""Ranks as threads of this process, with a Collective's sums, for what ranks decide and compute together."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import mlx.core as mx

from engine.trainer.collective import Collective

Result = TypeVar("Result")


class _Table:
    def __init__(self, size: int) -> None:
        self.rows: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)
        self.sent: defaultdict[tuple[int, int], queue.SimpleQueue[mx.array]] = defaultdict(queue.SimpleQueue)
        """By sender and receiver."""


class Member(Collective):
    """One rank's side: a Collective's `all_sum` and `gather_arrays`, whose parts run one after the other, and messages
    to one rank, which the sender does not wait for."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.size = len(table.rows)
        self.waited_s = 0.0
        self._later: Callable[[], mx.array] | None = None

    def start_sum(self, array: mx.array) -> None:
        assert self._later is None
        self._later = lambda: self.all_sum(array)

    def start_gather(self, array: mx.array) -> None:
        assert self._later is None
        self._later = lambda: self.gather_arrays(array)

    def start_send(self, array: mx.array, rank: int) -> None:
        mx.eval(array)
        self._table.sent[self.rank, rank].put(array)
        self._later = lambda: array

    def recv_lazy(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> Any:
        return shape, dtype, rank

    def receive(self, expected: Any) -> mx.array:
        shape, dtype, rank = expected
        array = self._table.sent[rank, self.rank].get(timeout=60)
        assert (array.shape, array.dtype) == (shape, dtype)
        return array

    def finish(self) -> mx.array:
        assert self._later is not None
        operation, self._later = self._later, None
        return operation()

    def all_sum(self, array: mx.array) -> mx.array:
        mx.eval(array)
        rows: list[mx.array] = self._exchange(array)
        shapes = {(row.shape, row.dtype) for row in rows}
        assert len(shapes) == 1, f"ranks sum different things: {shapes}"
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        mx.eval(total)
        return total

    def gather_arrays(self, array: mx.array) -> mx.array:
        mx.eval(array)
        gathered = mx.stack(self._exchange(array))
        mx.eval(gathered)
        return gathered

    def _exchange(self, mine: Any) -> list[Any]:
        self._table.rows[self.rank] = mine
        self._table.barrier.wait()
        rows = list(self._table.rows)
        self._table.barrier.wait()
        return rows


def together(size: int, work: Callable[[Collective], Result]) -> list[Result]:
    """The results of `work` on each of `size` ranks; if one raises, the others fail too."""
    table = _Table(size)

    def one(rank: int) -> Result:
        try:
            return work(Member(table, rank))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        return [future.result() for future in futures]
