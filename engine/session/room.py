"""What every room of the session stands on: the state directory, its store, and the connections to the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.models import FlightConfig
from engine.runs.layout import state_home

if TYPE_CHECKING:
    from engine.store.store import Store
    from engine.transport.fleet import Fleet


class Room:
    """One of the session's; they all share one state directory and one set of connections."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or state_home()
        self.notices: list[str] = []
        """What was found damaged in the state and what was done about it, one line each, for people."""
        self._fleets: dict[tuple[str, ...], Fleet] = {}

    def fleet(self, config: FlightConfig) -> Fleet:
        """The connections to the configuration's nodes, kept until `close`."""
        from engine.transport.fleet import Fleet

        hosts = tuple(node.ssh for node in config.nodes)
        if hosts not in self._fleets:
            self._fleets[hosts] = Fleet(config.nodes, self.home)
        return self._fleets[hosts]

    async def close(self) -> None:
        """Close all connections to nodes; runs go on."""
        fleets = list(self._fleets.values())
        self._fleets.clear()
        for fleet in fleets:
            await fleet.close()

    def _store(self) -> Store:
        from engine.store.store import Store

        return Store(self.home)
