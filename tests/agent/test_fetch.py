"""The files of a result come to this machine as they were saved, or not at all; what has come is not sent again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.api import Engine, results
from engine.cluster import file_copy
from engine.cluster.agent_client import AgentClient
from engine.cluster.file_copy import FileCopy, FileDiffers
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, InputError, LaunchError, NodeUnreachable
from engine.node.probes.files import READ_BYTES
from engine.protocol.messages import RequestEnded
from engine.run.events import SavedFiles, StateSaved, WeightsSaved
from engine.run.run_plan import write_plan
from engine.snapshots import Fetched, FetchProgress, ResultFile
from tests.unit.run.run_maker import MadeRun
from tests.waiting import until

HERE = NodeConfig(name="here", python=sys.executable, workdir="/")
SIZE = 20 * READ_BYTES + 12_345
LIMIT = 16 * READ_BYTES
"""Bytes that may be under way."""


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[AgentClient]:
    agent = AgentClient(HERE, LocalTransport())
    yield agent
    await agent.aclose()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ResultFile:
    path = tmp_path_factory.mktemp("node") / "model.safetensors"
    path.write_bytes(os.urandom(SIZE))
    return result_file(path)


def result_file(path: Path) -> ResultFile:
    content = path.read_bytes()
    return ResultFile(
        "model", False, 4, "here", str(path), path.name, len(content), hashlib.sha256(content).hexdigest()
    )


def copy_of(agent: AgentClient, source: ResultFile, part: Path, **changed: Any) -> FileCopy:
    given: dict[str, Any] = {"patience_s": 0.0, "on_bytes": lambda _: None, "on_away": lambda _: None}
    return FileCopy(agent, source, part, **{**given, **changed})


async def killed_at(agent: AgentClient, offset: int) -> Callable[[int], None]:
    """Ends the agent once so many bytes have come."""
    pid = int((await agent.run(["/bin/sh", "-c", "echo $PPID"], timeout_s=20)).stdout)
    came = 0

    def count(size: int) -> None:
        nonlocal came
        came += size
        if came >= offset and came - size < offset:
            os.kill(pid, signal.SIGKILL)

    return count


async def test_a_file_comes_whole(agent: AgentClient, source: ResultFile, tmp_path: Path) -> None:
    pieces: list[int] = []
    await copy_of(agent, source, tmp_path / "part", on_bytes=pieces.append).run()
    assert (tmp_path / "part").read_bytes() == Path(source.path).read_bytes()
    assert sum(pieces) == SIZE and max(pieces) <= LIMIT


async def test_a_node_sends_no_more_of_a_file_than_it_is_asked_for(agent: AgentClient, source: ResultFile) -> None:
    with contextlib.closing(await agent.start_probe("read", source.path, "5")) as request:
        assert await request.next_line(20) == f'{{"size": {SIZE}}}'.encode()
        for wanted in (1, 3):
            request.send(b"." * wanted)
            await until(lambda wanted=wanted: len(request.output) >= wanted * READ_BYTES)  # type: ignore[misc]
            # Its answer comes behind what it would have sent.
            await agent.run(["true"], timeout_s=20)
            assert len(request.output) == wanted * READ_BYTES
            request.output.clear()


async def test_a_lost_connection_is_opened_anew_and_goes_on_where_it_was(
    agent: AgentClient, source: ResultFile, tmp_path: Path
) -> None:
    notes: list[str] = []
    kill, came = await killed_at(agent, SIZE // 2), list[int]()

    def count(size: int) -> None:
        came.append(size)
        kill(size)

    await copy_of(agent, source, tmp_path / "part", patience_s=60, on_bytes=count, on_away=notes.append).run()
    assert (tmp_path / "part").read_bytes() == Path(source.path).read_bytes()
    assert sum(came) == SIZE, "nothing came twice"
    assert notes in (["here is away, tried again for 60 s"], ["here is away, tried again for 59 s"])


async def test_what_has_come_before_it_was_given_up_is_kept_for_the_next_time(
    agent: AgentClient, source: ResultFile, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    with pytest.raises(NodeUnreachable):
        await copy_of(agent, source, part, on_bytes=await killed_at(agent, SIZE // 2)).run()
    kept = part.stat().st_size
    assert kept >= SIZE // 2
    pieces: list[int] = []
    await copy_of(agent, source, part, on_bytes=pieces.append).run()
    assert sum(pieces) == SIZE - kept
    assert part.read_bytes() == Path(source.path).read_bytes()


async def test_what_an_earlier_copy_has_left_damaged_is_sent_again(
    agent: AgentClient, source: ResultFile, tmp_path: Path
) -> None:
    part, pieces = tmp_path / "part", list[int]()
    for left in (b"\0" * 1000, b"\0" * (SIZE + 1)):
        part.write_bytes(left)
        await copy_of(agent, source, part, on_bytes=pieces.append).run()
        assert part.read_bytes() == Path(source.path).read_bytes()
    assert sum(pieces) == 2 * SIZE - 1000


async def test_a_file_that_is_another_one_by_now_is_not_kept(agent: AgentClient, tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    path.write_bytes(b"as saved")
    saved = result_file(path)

    async def refusal() -> str:
        with pytest.raises(FileDiffers) as refused:
            await copy_of(agent, saved, tmp_path / "part").run()
        assert not (tmp_path / "part").exists()
        return str(refused.value)

    path.write_bytes(b"replaced")
    begin = f"here: {path} is not what was saved"
    assert (await refusal()).startswith(f"{begin}: it is damaged or was replaced since: SHA-256 ")
    path.write_bytes(b"longer than it was")
    assert await refusal() == f"{begin}: it has 18 bytes, and had 8"
    path.unlink()
    assert await refusal() == f"{begin}: No such file or directory"
    os.mkfifo(path)
    assert await refusal() == f"{begin}: it is not a regular file"


class Hostile:
    """An agent, and its one request."""

    def __init__(self, *output: bytes | RequestEnded) -> None:
        self.output = list(output)
        self.granted = 0

    async def start_probe(self, *_: str) -> Hostile:
        return self

    async def next_line(self, _: float) -> bytes | RequestEnded:
        return self.output.pop(0)

    next_data = next_line

    def send(self, data: bytes) -> None:
        self.granted += len(data)

    def close(self) -> None:
        pass


async def test_no_more_of_a_file_is_under_way_than_is_wanted(tmp_path: Path) -> None:
    content = b"0123456789abcdef" * (3 * READ_BYTES)
    saved = ResultFile("model", False, 4, "here", "/x", "x", len(content), hashlib.sha256(content).hexdigest())
    sizes = [READ_BYTES // 2, READ_BYTES, 3 * READ_BYTES // 2] * 16
    offsets = [sum(sizes[:place]) for place in range(len(sizes))]
    pieces = [content[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    agent: Any = Hostile(f'{{"size": {len(content)}}}'.encode(), *pieces)
    came = 0

    def count(size: int) -> None:
        nonlocal came
        came += size
        assert agent.granted * READ_BYTES - came <= LIMIT

    await copy_of(agent, saved, tmp_path / "part", on_bytes=count).run()
    assert came == len(content)
    assert agent.granted == len(content) // READ_BYTES + LIMIT // READ_BYTES, "and it never waits for nothing"


@pytest.mark.parametrize(
    "output",
    [
        (b'{"size": 8}', b"more than eight"),
        (b'{"size": "8"}',),
        (b'{"size": [8]}',),
        (b"[]", b"\0" * 8),
        (b"{}", RequestEnded(1, 1, "\x1b[2JOSError")),
        (RequestEnded(1, 1, "no such probe"), RequestEnded(1, 1, "")),
        (b'{"problem": {"a": 1}}',),
    ],
)
async def test_an_agent_that_says_anything_else_fills_neither_disk_nor_screen(tmp_path: Path, output: Any) -> None:
    saved = ResultFile("model", False, 4, "here", "/x", "x", 8, hashlib.sha256(b"as saved").hexdigest())
    hostile: Any = Hostile(*output)
    with pytest.raises(FlightDeckError) as refused:
        await copy_of(hostile, saved, tmp_path / "part").run()
    assert str(refused.value).isprintable()
    assert not (tmp_path / "part").exists() or (tmp_path / "part").stat().st_size <= 8


async def test_two_fetches_do_not_write_one_file(agent: AgentClient, source: ResultFile, tmp_path: Path) -> None:
    second: list[BaseException] = []

    async def again() -> None:
        try:
            await copy_of(agent, source, tmp_path / "part").run()
        except LaunchError as error:
            second.append(error)

    tasks: list[asyncio.Task[None]] = []

    def begin(_: int) -> None:
        if not tasks:
            tasks.append(asyncio.create_task(again()))

    await copy_of(agent, source, tmp_path / "part", on_bytes=begin).run()
    await tasks[0]
    assert [str(error) for error in second] == [f"{tmp_path / 'part'}: another fetch writes it"]


def weights(folder: Path, *names: str, val_loss: float | None = None, holds: str = "adapter") -> WeightsSaved:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} {val_loss}")
    given = {"rank": 0, "node": "node0", "attempt": 1, "holds": holds, "val_loss": val_loss}
    return WeightsSaved.model_validate({**given, "saved": saved_files(folder, *names)})


def saved_files(folder: Path, *names: str, parts: int = 1) -> SavedFiles:
    hashed = [(name, result_file(folder / name)) for name in names]
    files = tuple((name, file.bytes, file.sha256) for name, file in hashed)
    return SavedFiles(folder=str(folder), iteration=4, files=files, parts=parts)


@pytest.fixture
def run(home: Path) -> MadeRun:
    return MadeRun(home).state("preflight", "launching").attempt()


async def fetched(run: MadeRun, folder: Path | None, wanted: str = "trained") -> Fetched:
    async with Engine(home=run.home) as engine:
        *progress, last = [step async for step in engine.results.fetch(run.id, folder, wanted)]
    assert all(isinstance(step, FetchProgress) for step in progress)
    assert isinstance(last, Fetched)
    return last


async def test_the_adapter_is_fetched_to_a_folder_of_the_runs_name_and_then_is_there(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved, config = tmp_path / "node" / "0000004_adapters.safetensors", "adapter_config.json"
    run.append(weights(saved.parent, saved.name, config))
    done = await fetched(run, None)
    assert done.folder == tmp_path / run.id
    assert {path.name for path in done.folder.iterdir()} == {"adapters.safetensors", config}
    assert (done.folder / "adapters.safetensors").read_bytes() == saved.read_bytes()
    shutil.rmtree(saved.parent)
    assert (await fetched(run, None)).files == done.files, "what is there is not asked for again"
    (done.folder / config).write_text("mine")
    with pytest.raises(InputError, match=r"adapter_config\.json is there, and another file"):
        await fetched(run, None)


async def test_all_parts_of_a_checkpoint_come_from_all_nodes(run: MadeRun, tmp_path: Path) -> None:
    """Each part in a folder of its own, as the trainer looks for them."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    second = run.plan.config.nodes[1].model_copy(update={"python": str(python)})
    config = run.plan.config.model_copy(update={"nodes": (run.plan.config.nodes[0], second)})
    write_plan(run.directory.plan, run.plan.model_copy(update={"config": config}))
    for part in (0, 1):
        folder = tmp_path / f"node{part}" / f"part{part}" / "step-000000004"
        weights(folder, "weights.safetensors", "manifest.json", val_loss=part)
        saved = saved_files(folder, "weights.safetensors", "manifest.json", parts=2)
        run.append(StateSaved(rank=part, node=f"node{part}", state=f"4.{part}", manifest="0" * 64, saved=saved))
    done = await fetched(run, tmp_path / "here", "checkpoint")
    for part in (0, 1):
        path = f"part{part}/step-000000004/weights.safetensors"
        assert (done.folder / path).read_bytes() == (tmp_path / f"node{part}" / path).read_bytes()
    assert len(done.files) == 4


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("best", "no best weights were saved: that takes save_best = true in [job]"),
        ("weights", "no full weights were saved: the run trains an adapter"),
        ("checkpoint", "no checkpoint has been saved whole"),
    ],
)
async def test_what_was_not_saved_is_refused(run: MadeRun, tmp_path: Path, wanted: str, why: str) -> None:
    with pytest.raises(InputError, match="no weights were saved so far"):
        await fetched(run, tmp_path / "here")
    run.append(weights(tmp_path / "node", "adapters.safetensors"))
    with pytest.raises(InputError) as refused:
        await fetched(run, tmp_path / "here", wanted)
    assert refused.value.why == why and not (tmp_path / "here").exists()


async def test_a_fetch_that_cannot_succeed_writes_nothing(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.append(weights(tmp_path / "node", "a", "sub/b"))
    target = tmp_path / "here"
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 9))
        with pytest.raises(InputError, match=r"here has no room: it takes 16 B, .*: 64.0 MB more than are free"):
            await fetched(run, target)
    away = run.plan.config.nodes[0].model_copy(update={"ssh": "nobody@127.0.0.1:1"})
    config = run.plan.config.model_copy(update={"nodes": (away, run.plan.config.nodes[1])})
    write_plan(run.directory.plan, run.plan.model_copy(update={"config": config}))
    with pytest.raises(NodeUnreachable):
        await fetched(run, target)
    assert not target.exists()
    target.mkdir()
    (target / "sub").symlink_to(tmp_path)
    with pytest.raises(InputError, match="outside of the allowed directories"):
        await fetched(run, target)


def test_a_rate_is_given_once_bytes_have_come_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the time until the first ones come counts, nor what has come with them."""
    times, reports = [30.0, 30.1, 31.0, 32.0, 33.0], list[FetchProgress]()
    progress = results._Progress(100_000, 500, reports.append)
    monkeypatch.setattr(time, "monotonic", iter(times).__next__)
    for _ in times:
        progress.add(1000)
    assert [(step.bytes, step.bytes_per_s) for step in reports] == [
        (500, None),
        (1500, None),
        (3500, None),
        (4500, 1500.0),
        (5500, pytest.approx(4000 / 3)),
    ]


async def test_what_was_verified_takes_its_name_only_when_all_is_there(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_copy, "_RETRY_S", 0.0)
    run.append(weights(tmp_path / "node", "a", "b"))
    (tmp_path / "node" / "b").write_text("b Nine")
    with pytest.raises(FileDiffers):
        await fetched(run, tmp_path / "here")
    (part,) = (tmp_path / "here").iterdir()
    assert part.name.startswith("a.") and part.suffix == ".part"
    (tmp_path / "node" / "b").write_text("b None")
    assert {path.name for path in (await fetched(run, tmp_path / "here")).folder.iterdir()} == {"a", "b"}
