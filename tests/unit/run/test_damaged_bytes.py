"""Each file that we keep, with bytes as a failing disk leaves them: its reader gives a value, or its typed error."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StateError
from engine.models import CheckResult, CheckStatus, PreflightReport
from engine.protocol.attempt import ExitRecord, Identity, read_exit, read_identity
from engine.protocol.safetensors import CheckpointError, check_header
from engine.run.history import run_history
from engine.run.journal import read_journal
from engine.run.logs.mirror import Mirror
from engine.run.logs.reader import LogReader
from engine.run.run_plan import copy_of, read_plan
from engine.run.watch import RunWatch
from engine.store.layout import RunDir
from engine.store.store import Store
from engine.training.checkpoint_files import FileEntry, Manifest
from tests.unit.run.logs.run_logs import RunLogs
from tests.unit.run.run_maker import START, MadeRun, report
from tests.unit.store.records import record


@dataclass(frozen=True)
class Damaged:
    file: Path
    read: Callable[[], object]
    error: type[Exception] | tuple[()] = ()
    """All that may be raised."""


def of_run(place: Callable[[RunDir], Path]) -> Callable[[Path], Damaged]:
    """A file of a run, which is read by a frontend."""

    def made(home: Path) -> Damaged:
        run = MadeRun(home).state("preflight", "launching").attempt().state("running").supervised_by()
        run.metrics([report(number, 4.0) for number in range(1, 4)])
        run.events(0, {"event": "start", "iterations": 9}, {"event": "step", "iteration": 3, "compute_s": 0.1})
        check = CheckResult(name="ports_free", status=CheckStatus.PASS, summary="free")
        run.directory.preflight.write_text(
            PreflightReport(overall_status=CheckStatus.PASS, checks=[check]).model_dump_json()
        )
        run.close()
        return Damaged(place(run.directory), lambda: RunWatch(run.directory).poll(), StateError)

    return made


def journal(home: Path) -> Damaged:
    run = MadeRun(home).state("preflight", "launching").attempt().state("running").close()
    return Damaged(
        run.directory.journal, lambda: run_history(read_journal(run.directory.journal), run.plan), StateError
    )


def plan_without(place: Callable[[Path], Path], other: Callable[[Path], Path]) -> Callable[[Path], Damaged]:
    """The plan or its copy, while the other one is gone."""

    def made(home: Path) -> Damaged:
        plan = MadeRun(home).close().directory.plan
        other(plan).unlink()
        return Damaged(place(plan), lambda: read_plan(plan), StateError)

    return made


def state(name: str) -> Callable[[Path], Damaged]:
    def made(home: Path) -> Damaged:
        for number in (1, 2):
            Store(home).put_run(record(number))
        if name != "state.json":
            (home / "state.json").unlink()
        return Damaged(home / name, lambda: Store(home).runs(), StateError)

    return made


def index(place: Callable[[RunDir], Path]) -> Callable[[Path], Damaged]:
    """The index of a log, which is read and then repaired."""

    def made(home: Path) -> Damaged:
        logs = RunLogs(home)
        for number in range(6):
            logs.write(number % 2, f"line {number}\nand ")

        def read() -> None:
            for source in (None, 0):
                reader = LogReader(logs.run_dir, source)
                reader.lines(0, min(reader.line_count, 1000))
                reader.close()
            Mirror(logs.run_dir, print).close()
            reader = LogReader(logs.run_dir)
            assert [line.text for line in reader.lines(0, reader.line_count)], "the log itself is whole"
            reader.close()

        return Damaged(place(logs.run_dir), read)

    return made


def of_node(kind: type[Any], read: Callable[[Path], object], *values: object) -> Callable[[Path], Damaged]:
    def made(home: Path) -> Damaged:
        file = home / "file.json"
        file.write_text(json.dumps(asdict(kind(*values))))
        return Damaged(file, lambda: read(file))

    return made


def manifest(home: Path) -> Damaged:
    entry = FileEntry("weights.safetensors", "0" * 64, 9, 9, "none")
    whole = Manifest("job", 2, 0, 1, {"train.jsonl": "0" * 64}, 6, 3, versions={"mlx": "0.32"}, files=(entry,))
    (home / "manifest.json").write_bytes(whole.to_json())
    return Damaged(
        home / "manifest.json", lambda: Manifest.from_json((home / "manifest.json").read_bytes()), CheckpointError
    )


def safetensors(home: Path) -> Damaged:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"k": "v"}})
    (home / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(24))
    return Damaged(home / "a.safetensors", lambda: check_header(home / "a.safetensors"), CheckpointError)


FILES: dict[str, Callable[[Path], Damaged]] = {
    "state.json": state("state.json"),
    "state.json.previous": state("state.json.previous"),
    "plan.json": plan_without(lambda plan: plan, copy_of),
    "plan.json.copy": plan_without(copy_of, lambda plan: plan),
    "journal.jsonl": journal,
    "journal.jsonl, shown": of_run(lambda run: run.journal),
    "plan.json, shown": of_run(lambda run: run.plan),
    "metrics.jsonl": of_run(lambda run: run.metrics),
    "rank0.events.jsonl": of_run(lambda run: run.events(0)),
    "supervisor.json": of_run(lambda run: run.supervisor),
    "preflight.json": of_run(lambda run: run.preflight),
    "rank0.idx": index(lambda run: run.index(0)),
    "merged.idx": index(lambda run: run.merged_index),
    "exit.json": of_node(ExitRecord, read_exit, 0, 1, 3, None, 1.7e9, 20),
    "identity.json": of_node(
        Identity, read_identity, 0, "r", 1, "n", "boot", 1, "then", 2, 2, "then", START.timestamp()
    ),
    "manifest.json": manifest,
    "safetensors": safetensors,
}


def damages(whole: bytes) -> Iterator[bytes]:
    chance = random.Random(len(whole))
    yield from (b"", bytes(len(whole)), whole + b"\0" * 9, whole + b"\xff{", whole + whole, whole[::-1])
    for _ in range(16):
        place, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
        yield whole[:place]
        yield whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
        yield (whole[:place] + bytes(chance.randrange(1, 64)) + whole[place + 64 :])[: len(whole)]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_a_value_or_its_error(tmp_path: Path, name: str) -> None:
    damaged = FILES[name](tmp_path)
    damaged.read()
    for content in damages(damaged.file.read_bytes()):
        damaged.file.write_bytes(content)
        try:
            damaged.read()
        except damaged.error as error:
            assert str(error).isprintable()
