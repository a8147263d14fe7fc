"""The removal of a copy that a run or a queued item reads."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from engine.api import model_copies, runs
from engine.api.engine import Engine
from engine.cluster import copies
from engine.cluster.agent_client import THIS_MACHINE
from engine.cluster.copies import Spreading
from engine.cluster.probe_results import NodeCopies
from engine.cluster.transfer import CopyManifest, TransferRefused
from engine.cluster.transport.fleet import Fleet
from engine.cluster.transport.local import LocalTransport
from engine.config.load import load_config
from engine.config.models import Config, NodeConfig
from engine.errors import InputError, NodeUnreachable
from engine.protocol.manifest import CopyFile, HubName
from engine.snapshots import CopyProgress
from tests.model_copies import cache_files
from tests.model_files import llama_files

TOML = '[[node]]\nname = "here"\n[job]\nmodel = "{model}"\ndata = "data"\n'


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "home"))
    return cache_files(tmp_path / "hub", HubName("model", "org/tiny"), llama_files())


def config(folder: Path, model: str) -> Config:
    (file := folder / "flightdeck.toml").write_text(TOML.format(model=model))
    return load_config(file)


async def test_what_a_queued_item_names_or_reads_is_kept_and_anything_else_removed(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(tmp_path / "home") as engine:
        for model in ("org/tiny", str(snapshot)):
            queued = config(tmp_path, model)
            monkeypatch.setattr(runs, "queued_configs", lambda _, queued=queued: {7: queued})
            with pytest.raises(InputError, match=r"is in use on here.*queued item 7 is to use it"):
                await engine.models.remove(queued, "org/tiny", "here")
        monkeypatch.setattr(runs, "queued_configs", lambda _: {7: config(tmp_path, "org/other")})
        freed = await engine.models.remove(config(tmp_path, "org/tiny"), "org/tiny", "here")
    assert freed >= sum(map(len, llama_files().values()))
    assert not snapshot.exists()


async def test_a_folder_of_a_nodes_home_is_removed_by_the_name_that_a_push_gives_it(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (pushed := tmp_path / "models/tiny", other := tmp_path / "x/models/tiny"):
        folder.mkdir(parents=True)
        for name, content in llama_files().items():
            (folder / name).write_bytes(content)
    async with Engine(tmp_path / "home") as engine:
        with pytest.raises(InputError, match="has no ~/models/small"):
            await engine.models.remove(config(tmp_path, "m"), "~/models/small", "here")
        assert await engine.models.remove(config(tmp_path, str(other)), "~/models/tiny", "here")
        assert not pushed.exists() and other.exists()


@pytest.mark.parametrize(("path", "kept"), [("/home/ana/models/x", True), ("/home/ana/models/y", False)])
def test_a_folder_that_a_run_names_below_the_nodes_home_is_in_use(tmp_path: Path, path: str, kept: bool) -> None:
    toml = '[[node]]\nname = "ana"\nssh = "ana"\npython = "/p"\n[job]\nmodel = "~/models/x/"\ndata = "~/data"\n'
    (file := tmp_path / "flightdeck.toml").write_text(toml)
    assert model_copies._reads(load_config(file), "ana", path, [path]) == kept
    assert not model_copies._reads(load_config(file), "bea", path, [path])


def manifest(**files: str) -> CopyManifest:
    listed = tuple(CopyFile(path, 1, digest * 64) for path, digest in files.items())
    return CopyManifest(THIS_MACHINE, "/models/x", listed)


def test_what_differs_in_a_folder_is_what_most_nodes_have_otherwise() -> None:
    sound, other = manifest(a="1", b="2"), manifest(a="1", b="3")
    assert [model_copies._differing(one, [sound, sound, other]) for one in (sound, other)] == [[], ["b"]]
    assert [model_copies._differing(one, [sound, other]) for one in (sound, other)] == [["b"], ["b"]], "nobody knows"
    more = manifest(a="1", b="2", c="4")
    assert model_copies._differing(more, [sound, sound, more]) == []
    assert model_copies._differing(sound, [more]) == ["c"], "this machine has it"
    assert [model_copies._differing(one, [sound, more]) for one in (sound, more)] == [["c"], []], "one of two has it"


async def test_a_folder_is_verified_against_the_one_that_was_pushed(tmp_path: Path, snapshot: Path) -> None:
    for folder in (tmp_path / "mine", tmp_path / "models" / "mine"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    here = config(tmp_path, "org/tiny")
    away = here.model_copy(update={"nodes": (here.nodes[0].model_copy(update={"ssh": "away"}),)})
    async with Engine(tmp_path / "home") as engine:
        engine.models._session.fleet._transports["away"] = LocalTransport()
        assert await engine.models.verify(away, str(tmp_path / "mine")) == {"here": []}
        (tmp_path / "models" / "mine" / "config.json").write_text("[]")
        assert await engine.models.verify(away, str(tmp_path / "mine")) == {"here": ["config.json"]}
        assert await engine.models.verify(away, "~/models/mine") == {"here": []}, "and there is no other"
        nowhere = await engine.models.verify(away, "~/models/none")
        assert nowhere == {"here": f"{tmp_path}/models/none is not there"}


async def test_this_machine_as_a_node_verifies_its_cache_and_its_own_folders(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    here = config(tmp_path, "org/tiny")
    async with Engine(tmp_path / "home") as engine:
        for name in ("org/tiny", "mine", "./mine", "~/mine"):
            assert not (await engine.models.verify(here, name))["here"]
        (snapshot / "config.json").resolve().write_text("[]")
        assert await engine.models.verify(here, "org/tiny") == {"here": ("config.json",)}


async def test_pushed_data_is_not_offered_to_another_job_nor_asked_of_the_hub(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is that of its folder, which another project's may have, too."""
    pushed, rows = HubName("dataset", "pushed/rows"), {"train.jsonl": b'{"text": "a"}\n'}
    cache_files(tmp_path / "home/node/pushed", pushed, rows)
    cache_files(tmp_path / "hub", HubName("dataset", "org/rows"), rows)
    monkeypatch.setattr(Spreading, "_ask_hub", None)
    here = config(tmp_path, "org/tiny")
    async with Engine(tmp_path / "home") as engine:
        assert "pushed/rows" in {copy.name for node in await engine.models.list(here) for copy in node.copies}
        assert [*await engine.setup.copies(here, dataset=True)] == ["hf:org/rows"]
        with pytest.raises(TransferRefused, match="no machine has pushed/other"):
            await Spreading(engine.models._session.fleet, {}, lambda _: None).repository(
                pushed._replace(name="pushed/other"), {"127.0.0.1": here.nodes[0]}, []
            )


async def test_the_machine_with_the_fastest_way_downloads(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, nodes = (
        list[CopyProgress](),
        [THIS_MACHINE.model_copy(update={"name": name, "ssh": name}) for name in "abcd"],
    )
    answers: dict[str, Any] = {
        "a": {"bytes": 9, "rate": 1e6},
        "b": {"problem": "offline"},
        "c": {"bytes": 9, "rate": 5e6},
        "d": {"bytes": 9 * 10**8},
    }

    async def ask(self: Spreading, node: NodeConfig, hub: HubName, **asked: object) -> dict[str, Any]:
        if node.name == "d" and asked.get("sample"):
            await asyncio.Event().wait()
        return {"problem": "no room"} if asked["get"] else dict(answers[node.name])

    monkeypatch.setattr(Spreading, "_ask_hub", ask)
    monkeypatch.setattr(copies, "_COMPARED_S", 0.1)
    async with Fleet(tmp_path / "home") as fleet:
        hub, spreading = HubName("model", "org/tiny"), Spreading(fleet, {}, notes.append)
        ways = await spreading._ways_out(hub, nodes)
        with pytest.raises(
            TransferRefused,
            match=r"no room for org/tiny: it takes 900 MB, .*: 464 MB more than are free",
        ):
            await spreading._download(hub, nodes, {node.ssh: node for node in nodes}, {"d": 5 * 10**8}, "")
    assert [node.name for node, _ in ways] == ["c", "a", "d", "b"], "who is late is tried after the others"
    assert {note.note for note in notes} == {"has the best way to the Hub: c 5.0 MB/s, a 1.0 MB/s"}


async def test_why_nothing_can_be_copied_is_told_in_one_sentence_that_names_a_node_once() -> None:
    fleet = SimpleNamespace(agent=Mock(side_effect=NodeUnreachable("cannot be reached", where="ana")))
    node = NodeConfig(name="ana", ssh="ana.test", python="/p", workdir="/w")
    answer = await Spreading(cast(Any, fleet), {}, report=print)._ask_hub(node, HubName("model", "org/x"), get=True)
    assert answer == {"problem": "cannot be reached"}
    with pytest.raises(InputError, match=r"^'nix' is neither a folder of this machine nor org/name of the Hugging"):
        model_copies._hub("nix", "model")


async def test_a_listing_that_is_left_asks_no_node_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = list[str]()

    async def copies_of(agent: Any, *, folders: list[str]) -> NodeCopies:
        if agent.node.name != "a":
            try:
                await asyncio.Event().wait()
            finally:
                left.append(agent.node.name)
        return NodeCopies(node=agent.node.name, problem="no cache")

    monkeypatch.setattr(model_copies, "copies_of", copies_of)
    nodes = "".join(f'[[node]]\nname = "{name}"\nssh = "{name}"\npython = "/p"\nworkdir = "/w"\n' for name in "abc")
    (file := tmp_path / "flightdeck.toml").write_text(f'{nodes}[job]\nmodel = "m"\ndata = "data"\n')
    async with Engine(tmp_path / "home") as engine, aclosing(engine.models.each(load_config(file))) as answers:
        assert (await anext(answers)).node == "a"
    assert left == ["b", "c"]
