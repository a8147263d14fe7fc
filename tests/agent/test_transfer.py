"""Transfers between processes of this machine, as the head conducts them: along a chain, resumed, damaged, refused."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from engine.cluster.agent_client import THIS_MACHINE, AgentRequest
from engine.cluster.transfer import next_report
from engine.errors import LaunchError
from engine.models import Late
from engine.protocol.manifest import CopyFile, HubName
from tests.model_copies import COMMIT, cache_files, git_digest

TOKEN = "0" * 32
HUB = HubName("model", "org/tiny", COMMIT)
WEIGHTS, CONFIG = os.urandom(3_000_000), b"{}"
FILES = (
    CopyFile("config.json", len(CONFIG), git_digest(CONFIG)),
    CopyFile("sub/model.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest()),
    CopyFile("again.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest()),
)


class Process:
    """The `transfer` probe on a machine whose home is `home`."""

    def __init__(self, home: Path, **request: object) -> None:
        home.mkdir(exist_ok=True)
        environment = {**os.environ, "HOME": str(home), "FLIGHTDECK_HOME": str(home / "flightdeck"), "SHELL": "/bin/sh"}
        for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.node.probes", "transfer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.snapshot = home / ".cache/huggingface/hub" / HUB.folder / "snapshots" / COMMIT
        self.send({"files": FILES, "token": TOKEN, "addresses": [], **request})

    def send(self, document: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(document).encode() + b"\n")
        self.process.stdin.flush()

    def until(self, *names: str) -> dict[str, Any]:
        """The next report with one of these."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            report: dict[str, Any] = json.loads(line)
            if not report.keys().isdisjoint(names):
                return report
        raise AssertionError(f"it ended without {names}")

    def port(self) -> int:
        port: int = self.until("ready")["ready"]["port"]
        return port

    def fetch_from(self, *ports: int) -> None:
        self.until("wants")
        self.send({"upstreams": [("127.0.0.1", port) for port in ports]})

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Machines:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Process] = []

    def start(self, name: str, **request: object) -> Process:
        self.started.append(Process(self.folder / name, **request))
        return self.started[-1]

    def receiver(self, name: str, **request: object) -> Process:
        return self.start(name, **{"repository": HUB, "refs": ["main"], **request})

    def source(self) -> Process:
        folder = self.folder / "source-files"
        if not folder.exists():
            cache_files(self.folder / "hub", HUB, {"config.json": CONFIG, "sub/model.safetensors": WEIGHTS})
            snapshot = self.folder / "hub" / HUB.folder / "snapshots" / COMMIT
            (snapshot / "again.safetensors").symlink_to("sub/model.safetensors")
            folder.symlink_to(snapshot)
        return self.start("source", folder=str(folder), source=str(folder))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    yield machines
    for process in machines.started:
        process.end()


def check_whole(receiver: Process) -> None:
    snapshot = receiver.snapshot
    assert receiver.until("done", "problem").get("done") == str(snapshot)
    assert (snapshot / "config.json").read_bytes() == CONFIG
    assert (snapshot / "sub/model.safetensors").read_bytes() == (snapshot / "again.safetensors").read_bytes() == WEIGHTS
    repository = snapshot.parents[1]
    assert (repository / "refs" / "main").read_text() == COMMIT
    assert {path.name for path in (repository / "blobs").iterdir()} == {file.digest for file in FILES}


def test_a_copy_goes_along_a_chain_into_caches(machines: Machines) -> None:
    source, ana, bea = machines.source(), machines.receiver("ana"), machines.receiver("bea")
    first = source.port()
    second = ana.port()
    bea.fetch_from(second)
    ana.fetch_from(first)
    check_whole(bea)
    check_whole(ana)


def test_what_has_come_is_not_sent_again_and_another_upstream_is_taken(machines: Machines) -> None:
    source, ana = machines.source(), machines.receiver("ana")
    blobs = ana.snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    ana.end()
    (blobs / f"{FILES[1].digest}.part").write_bytes(WEIGHTS[:2_000_000])
    ana = machines.receiver("ana")
    ready = ana.until("ready")["ready"]
    assert (ready["have"], ready["wanted"]) == (2_000_000, 1_000_000 + len(CONFIG))
    ana.fetch_from(1, source.port())
    check_whole(ana)


def test_a_damaged_part_is_dropped_and_a_damaged_blob_repaired(machines: Machines) -> None:
    port = machines.source().port()
    ana = machines.receiver("ana")
    ana.fetch_from(port)
    check_whole(ana)
    ana.end()
    blob = ana.snapshot.parents[1] / "blobs" / FILES[1].digest
    blob.write_bytes(b"x" * len(WEIGHTS))
    ana = machines.receiver("ana", verify=True)
    ready = ana.until("ready")["ready"]
    assert (ready["have"], ready["wanted"]) == (len(CONFIG), len(WEIGHTS))
    ana.end()
    blob.with_name(f"{blob.name}.part").write_bytes(b"y" * 1000)
    ana = machines.receiver("ana", verify=True)
    ana.fetch_from(port)
    ana.fetch_from(port)
    check_whole(ana)


def test_a_disk_that_fills_ends_the_transfer_and_the_next_continues_what_it_took(machines: Machines) -> None:
    port = machines.source().port()
    ana = machines.receiver("ana")
    # In the middle of a block, of which the disk takes a piece.
    resource.prlimit(ana.process.pid, resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    ana.fetch_from(port)
    assert ana.until("problem", "wants", "done").get("problem") == os.strerror(errno.EFBIG)
    ana.end()
    ana = machines.receiver("ana")
    assert ana.until("ready")["ready"]["have"] == 1_000_000 + len(CONFIG)
    ana.fetch_from(port)
    check_whole(ana)


def test_a_file_that_is_damaged_at_its_source_is_told(machines: Machines) -> None:
    port = machines.source().port()
    (machines.folder / "source-files" / "sub/model.safetensors").resolve().write_bytes(b"x" * len(WEIGHTS))
    ana = machines.receiver("ana")
    for _ in range(3):
        ana.fetch_from(port)
    assert "damaged where it comes from" in ana.until("problem")["problem"]
    assert not ana.snapshot.exists()


def test_a_folder_with_another_file_is_kept_unless_it_is_to_be_replaced(machines: Machines) -> None:
    port = machines.source().port()
    there = machines.folder / "there"
    there.mkdir()
    (there / "config.json").write_text("mine")
    ana = machines.start("ana", folder=str(there))
    assert "--replace" in ana.until("problem")["problem"]
    ana = machines.start("ana", folder=str(there), replace=True)
    ana.fetch_from(port)
    assert ana.until("done", "problem")["done"] == str(there)
    assert (there / "config.json").read_bytes() == CONFIG
    assert (there / "again.safetensors").read_bytes() == WEIGHTS
    assert {path.name for path in there.iterdir()} == {"config.json", "sub", "again.safetensors"}


def test_nothing_is_written_behind_a_link_that_leads_out(machines: Machines) -> None:
    there, elsewhere = machines.folder / "there", machines.folder / "elsewhere"
    there.mkdir()
    elsewhere.mkdir()
    (there / "sub").symlink_to(elsewhere)
    ana = machines.start("ana", folder=str(there))
    assert "leads out of" in ana.until("problem")["problem"]
    assert not any(elsewhere.iterdir())


def test_pushed_data_that_no_run_names_is_removed_but_the_newest(machines: Machines) -> None:
    port, ana = machines.source().port(), machines.folder / "ana"
    repository = ana / "flightdeck/node/pushed/datasets--pushed--rows"
    old = {f"{number:040}": b"rows %d" % number for number in range(5)}
    for age, (content, rows) in enumerate(reversed(old.items()), start=1):
        snapshot = cache_files(ana / "flightdeck/node/pushed", HubName("dataset", "pushed/rows"), {"r": rows}, content)
        os.utime(snapshot, (1e9 - age, 1e9 - age))
    named, *unnamed = old
    (spec := ana / "flightdeck/node/runs/demo/attempts/1/spec.json").parent.mkdir(parents=True)
    spec.write_text(json.dumps({"data": f"{repository}/snapshots/{named}"}))
    receiver = machines.start("ana", repository=HubName("dataset", "pushed/rows", COMMIT))
    receiver.fetch_from(port)
    assert receiver.until("done", "problem").get("freed") == sum(len(old[content]) for content in unnamed[:2])
    kept = {COMMIT, named, *unnamed[2:]}
    assert {path.name for path in (repository / "snapshots").iterdir()} == kept
    assert all(path.exists() for path in (repository / "snapshots").rglob("*")), "with their content"
    assert len([*(repository / "blobs").iterdir()]) == len(FILES) - 1 + len(kept) - 1


@pytest.mark.parametrize(
    "request_", [{"files": [["../x", 1, "a" * 64]]}, {"repository": ["model", "../../x", COMMIT]}, {"files": 1}]
)
def test_a_request_that_leads_elsewhere_is_refused(machines: Machines, request_: dict[str, object]) -> None:
    assert machines.receiver("ana", **request_).until("problem", "ready")["problem"]


def test_whoever_does_not_know_the_token_gets_nothing(machines: Machines) -> None:
    port = machines.source().port()
    ana = machines.receiver("ana", token="1" * 32)
    ana.fetch_from(port)
    assert "closed" in ana.until("wants")["wants"]


def test_a_second_transfer_to_a_place_waits_for_the_first(machines: Machines) -> None:
    port = machines.source().port()
    first = machines.receiver("ana")
    first.until("ready")
    second = machines.receiver("ana")
    second.until("waiting")
    first.send({"upstreams": [("127.0.0.1", port)]})
    check_whole(first)
    check_whole(second)


async def test_a_node_that_reports_nothing_has_not_ended() -> None:
    class Silent:
        async def next_line(self, timeout_s: float) -> Late:
            return Late(command="the probe", after_s=timeout_s)

    with pytest.raises(LaunchError, match="reported nothing for 60 s"):
        await next_report(cast(AgentRequest, Silent()), THIS_MACHINE)
