"""An engine that only reads, for a console that shows runs and nodes to whoever may look and not act."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NoReturn

from engine.api.engine import Engine
from engine.errors import InputError

_READS: Final[dict[str, Collection[str]]] = {
    "nodes": ("is_accepted", "programs", "last_facts", "probe_each", "telemetry", "topology", "network_plan"),
    "runs": ("all", "find", "watch", "series"),
    "comparisons": ("compare",),
    "launches": ("plan", "differences"),
    "queue": ("snapshot",),
    "models": ("list", "each"),
    "calibrations": ("latest", "latest_scaling", "predict"),
    **dict.fromkeys(("results", "checks", "tasks", "chats", "environments", "setup"), ()),
}
"""Each part's requests that change nothing but what is kept to read faster; all others are refused."""


class ReadOnlyEngine(Engine):
    """Asks another engine, which it closes with itself. A request that would change something raises InputError."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.home, self.notices = engine.home, engine.notices
        vars(self).update({part: _Part(engine, part) for part in _READS})

    @property
    def store(self) -> NoReturn:
        raise _refused("store")

    @property
    def fleet(self) -> NoReturn:
        raise _refused("fleet")

    def demo_config(self, *, ranks: int = 2, iters: int = 60) -> NoReturn:
        raise _refused("demo_config")

    async def close(self) -> None:
        await self._engine.close()


class _Part:
    def __init__(self, engine: Engine, part: str) -> None:
        self._of = engine, part

    def __getattr__(self, request: str) -> Any:
        engine, part = self._of
        if request not in _READS[part]:
            raise _refused(f"{part}.{request}")
        return getattr(getattr(engine, part), request)


def _refused(request: str) -> InputError:
    return InputError("this console only reads", where=request, todo="run flightdeck in a terminal to act")
