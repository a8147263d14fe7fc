"""A scene finds each thing out once, for all who ask; what one host lacks is no other's fault."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

import pytest

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import LaunchError, NodeUnreachable
from engine.preflight.answers import Problems
from engine.preflight.desk import Desk
from engine.preflight.scene import Scene
from engine.runs.layout import state_home
from engine.transport.base import Completed
from engine.transport.fleet import Fleet
from engine.transport.local import LocalTransport


class Way(LocalTransport):
    """This machine, under another name: counts what it is asked, and answers when it may."""

    def __init__(self, *, lost: bool = False) -> None:
        self.asked = 0
        self.may = asyncio.Event()
        self.may.set()
        self._lost = lost

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", directory: PurePath | None = None
    ) -> Completed:
        self.asked += 1
        await self.may.wait()
        if self._lost:
            raise NodeUnreachable("does not answer", where="mac")
        return await super().run(argv, timeout_s=timeout_s, stdin=stdin, directory=directory)


def on(config: FlightConfig, *hosts: str) -> FlightConfig:
    nodes = tuple(
        NodeConfig(name=f"node{rank}", ssh=host, python=sys.executable, workdir="~") for rank, host in enumerate(hosts)
    )
    return config.model_copy(update={"nodes": nodes})


def scene_of(config: FlightConfig, ways: dict[str, Way]) -> Scene:
    fleet = Fleet((), state_home())
    for host, way in ways.items():
        fleet.answer(host, way)
    return Scene(config, fleet)


async def test_all_who_ask_share_one_answer(config: FlightConfig) -> None:
    way = Way()
    scene = scene_of(on(config, "mac"), {"mac": way})
    first, second = await asyncio.gather(scene.interpreters(), scene.interpreters())
    assert first is second
    assert (first["node0"].python is not None, way.asked) == (True, 1)


async def test_who_gives_up_spoils_it_for_nobody(config: FlightConfig) -> None:
    way = Way()
    way.may.clear()
    scene = scene_of(on(config, "mac"), {"mac": way})
    impatient, patient = (asyncio.create_task(scene.interpreters()) for _ in range(2))
    while not way.asked:
        await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    way.may.set()
    assert (await patient)["node0"].python is not None
    assert way.asked == 1


async def test_a_failure_is_remembered_and_told_again(config: FlightConfig) -> None:
    way = Way(lost=True)
    scene = scene_of(on(config, "mac"), {"mac": way})
    for _ in range(2):
        with pytest.raises(NodeUnreachable, match="does not answer"):
            await scene.places()
    assert way.asked == 1


async def test_a_host_that_cannot_be_prepared_is_the_only_one_without_a_place(
    config: FlightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    scene = scene_of(on(config, "good", "lost", "good"), {"good": Way(), "lost": Way(lost=True)})
    good, lost, again = scene.config.nodes
    assert (await scene.place_of(good)).ranks == (0, 2)
    assert await scene.place_of(again) == await scene.place_of(good)
    with pytest.raises(NodeUnreachable):
        await scene.place_of(lost)
    with pytest.raises(NodeUnreachable):
        await scene.places()


async def test_closing_ends_what_is_still_being_found_out(config: FlightConfig) -> None:
    way = Way()
    way.may.clear()
    scene = scene_of(on(config, "mac"), {"mac": way})
    asking = asyncio.create_task(scene.interpreters())
    while not way.asked:
        await asyncio.sleep(0)
    await scene.close()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("said", ["", "no json", "[]", json.dumps({"problems": "many"}), json.dumps({"other": []})])
async def test_what_is_no_answer_is_refused_in_one_line(
    config: FlightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    async def liar(self: Desk, look: str, arguments: Sequence[str], *, timeout_s: float) -> Completed:
        return Completed(3, said.encode(), b"\x1b[31mworse\x1b[0m\n")

    monkeypatch.setattr(Desk, "ask", liar)
    scene = scene_of(on(config, "mac"), {"mac": Way()})
    with pytest.raises(LaunchError, match="node0: looking there ended with 3: worse"):
        await scene.look(scene.config.nodes[0], "addresses", "own", said=Problems, timeout_s=5)
