"""The console's client of the engine, as the screens below it know it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from engine.api import Engine

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class Client(Protocol):
    @property
    def engine(self) -> Engine: ...

    async def call(self, make: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer: ...

    def each(self, make: Callable[[], AsyncIterator[Item]], *, every_s: float = ...) -> AsyncGenerator[Item, None]: ...

    async def abort(self, run: str, *, now: bool) -> None: ...
