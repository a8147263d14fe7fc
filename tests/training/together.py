"""Ranks as threads of this process, with a Collective's sums, for decisions that ranks take together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from typing import Any, TypeVar, cast

import mlx.core as mx

from engine.trainer.collective import Collective

Result = TypeVar("Result")


class _Table:
    def __init__(self, size: int) -> None:
        self.rows: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class Member:
    """One rank's side: a Collective's sums and gathers, with at most one under way."""

    waited_s = 0.0

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self._under_way: tuple[mx.array, Callable[[list[mx.array]], mx.array]] | None = None
        self.rank = rank
        self.size = len(table.rows)

    def all_sum(self, array: mx.array) -> mx.array:
        self.start_sum(array)
        return self.finish()

    def gather_arrays(self, array: mx.array) -> mx.array:
        self.start_gather(array)
        return self.finish()

    def start_sum(self, array: mx.array) -> None:
        self._start(array, lambda rows: reduce(add, rows))

    def start_gather(self, array: mx.array) -> None:
        self._start(array, mx.stack)

    def finish(self) -> mx.array:
        assert self._under_way is not None
        (array, result), self._under_way = self._under_way, None
        rows: list[mx.array] = self._exchange(array)
        shapes = {(row.shape, row.dtype) for row in rows}
        assert len(shapes) == 1, f"ranks sum or gather different things: {shapes}"
        found = result(rows)
        mx.eval(found)
        return found

    def _start(self, array: mx.array, result: Callable[[list[mx.array]], mx.array]) -> None:
        assert self._under_way is None
        mx.eval(array)
        self._under_way = array, result

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
            return work(cast("Collective", Member(table, rank)))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        return [future.result() for future in futures]
