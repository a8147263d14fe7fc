"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from engine.run.journal import read_history
from engine.store.layout import RunDir
from tests.machine import used
from tests.needs import require, required

pytest_plugins = ["tests.cluster.fixtures"]

# How long an example takes is the machine's affair, and on a busy one no fault of the code. In CI they are the same
# ones in every run; elsewhere they are new ones each time.
settings.register_profile("flightdeck", deadline=None, derandomize=required(), max_examples=15)
settings.load_profile("flightdeck")

# Until everything is collected; see pytest_collection_finish.
gc.disable()

with contextlib.suppress(OSError):
    memory = os.statvfs("/dev/shm")
    if memory.f_bavail * memory.f_frsize > 8 << 30 and not memory.f_flag & os.ST_NOEXEC:
        # On a disk each of the tests' thousands of fsyncs takes milliseconds.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

FLIGHTDECK = Path(sys.executable).with_name("flightdeck")
"""The installed command."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked as one that `needs` what is missing here."""
    for mark in item.iter_markers("needs"):
        require(*mark.args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the tests whose ranks keep every core busy while they wait for each other: in a whole run one worker has
    them all, one after the other, as at the same time each would take several times as long. Last those for which the
    other workers wait: near the end there is less to wait for."""

    def place(item: pytest.Item) -> tuple[bool, bool, Path]:
        return bool(item.get_closest_marker("alone")), not item.get_closest_marker("busy"), item.path

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker begins with another part of a folder: in a new clone it compiles that one, and the others' not."""
    report = yield
    if isinstance(collector, pytest.Directory) and report.passed and (name := os.environ.get("PYTEST_XDIST_WORKER")):
        begin = int(name.removeprefix("gw")) * len(report.result) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[begin:] + report.result[:begin]
    return report


def pytest_make_parametrize_id(val: object) -> str | None:
    """A text of megabytes does not stand in its test's name, which every worker sends."""
    return f"{val[:40]!r}, {len(val):,} long" if isinstance(val, (str, bytes)) and len(val) > 200 else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is marked `alone` waits until the tests of the other workers have ended, and they wait for it."""
    factory: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    base = factory.getbasetemp()
    folder = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with used(folder, alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_collection_finish() -> None:
    """What has been imported and collected by now stays: no garbage collection looks through it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Garbage is looked for once, and what it raises is reported: pytest's own five collections find nothing left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary_files() -> Iterator[None]:
    """What programs that the tests start leave in their TMPDIR goes with the session: torchrun's and W&B's folders, of
    those that are killed above all. Its path is short, as W&B has a socket in it, and it is every user's."""
    with tempfile.TemporaryDirectory(prefix="fd-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o1777)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", folder)
            yield


@pytest.fixture
def nonce() -> str:
    """Used by this test alone: another run of the same test may be under way on this machine."""
    return uuid.uuid4().hex


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A FLIGHTDECK_HOME of this test's own. A run that a failed test leaves behind is aborted."""
    path = tmp_path / "home"
    monkeypatch.setenv("FLIGHTDECK_HOME", str(path))
    yield path
    for run in map(RunDir, (path / "runs").glob("*")):
        if run.supervisor.exists() and not read_history(run).record.state.ended:
            subprocess.run([FLIGHTDECK, "abort", run.id, "--now"], check=False, capture_output=True, timeout=60)
