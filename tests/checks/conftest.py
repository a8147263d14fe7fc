"""A cluster on this machine with a model directory and a corpus that the checks accept, to be broken by the tests."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.checks.check import CheckFunction
from engine.checks.context import CheckContext
from engine.cluster.transport import local
from engine.cluster.transport.fleet import Fleet
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import CheckName, ClusterConfig, Config, JobConfig, NodeConfig, PreflightConfig
from engine.measurements import Calibration, Division
from engine.models import CheckResult
from engine.node.probes.job import probe_adapters, probe_loading
from engine.node.probes.template import probe_template
from engine.security.paths import state_home
from tests.bundles import link_bundle
from tests.model_files import llama_files


@pytest.fixture(autouse=True)
def own_home(home: Path) -> Path:
    """A state directory of the test's own, with the node bundle that every probe runs from."""
    link_bundle(home / "node")
    return home


_SHARED: list[Fleet] = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_agent() -> AsyncIterator[None]:
    """One agent answers all tests of a module: to start one takes longer than most checks. Its environment (HOME) is
    that of the first test."""
    async with Fleet(state_home()) as fleet:
        _SHARED.append(fleet)
        yield
        _SHARED.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of one agent run in one event loop."""
    for item in items:
        if not isinstance(item, pytest.Function) or "shared_agent" not in item.fixturenames:
            continue
        if inspect.iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


def fleet_of(config: Config, *, own_agent: bool = False) -> contextlib.AbstractAsyncContextManager[Fleet]:
    """The way to the nodes, over the module's agent where it has one."""
    if _SHARED and not own_agent:
        _SHARED[0].home = state_home()
        return contextlib.nullcontext(_SHARED[0])
    return Fleet(state_home())


async def run_check(
    check: CheckFunction,
    config: Config,
    *,
    division: Division | None = None,
    calibration: Calibration | None = None,
    own_agent: bool = False,
) -> CheckResult:
    """What one check says of a configuration, without those that it needs."""
    async with fleet_of(config, own_agent=own_agent) as fleet:
        context = CheckContext(config, fleet, division=division, calibration=calibration)
        try:
            return await check(context)
        finally:
            await context.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Enough of a model to be found; nothing here loads it."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name, content in llama_files().items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """40 text lines to train on, 4 to validate with."""
    directory = tmp_path / "data"
    directory.mkdir()
    for name, count in (("train", 40), ("valid", 4)):
        lines = [json.dumps({"text": f"{name} {number}"}) for number in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture
def config(model: Path, data: Path, tmp_path: Path) -> Config:
    """Two ranks on 127.0.0.1 with this interpreter."""
    return make_config(model, data, tmp_path)


def make_config(
    model: Path,
    data: Path,
    workdir: Path,
    *,
    pythons: tuple[str, ...] = (sys.executable, sys.executable),
    starting_port: int | None = None,
    skip: tuple[CheckName, ...] = (),
    settings: dict[str, object] | None = None,
) -> Config:
    nodes = tuple(
        NodeConfig(name=f"node{rank}", python=python, workdir=str(workdir)) for rank, python in enumerate(pythons)
    )
    return Config(
        cluster=ClusterConfig(starting_port=starting_port),
        nodes=nodes,
        job=JobConfig(
            name="job",
            model=str(model),
            data=str(data),
            mlx_lm=with_defaults({"batch_size": 4, "iters": 10, "val_batches": 25, **(settings or {})}),
        ),
        preflight=PreflightConfig(all_sum_s=0.5, skip=skip),
    )


TRIALS = {"adapters": probe_adapters, "loading": probe_loading, "template": probe_template}


@pytest.fixture
def tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that try what mlx-lm does run in this process, which has imported it: a process of their own needs two
    seconds for it. Other tests of each module start one."""
    probe = CheckContext.probe
    for name in ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        # Which they set.
        monkeypatch.setenv(name, os.environ.get(name, ""))

    async def tried(context: CheckContext, node: NodeConfig, name: str, *arguments: str, **how: Any) -> Any:
        if name not in TRIALS:
            return await probe(context, node, name, *arguments, **how)
        return how["result_type"].model_validate_json(json.dumps(TRIALS[name](*arguments)))

    monkeypatch.setattr(CheckContext, "probe", tried)


@pytest.fixture
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody reaps a program's orphans, its end takes as long as these two."""
    monkeypatch.setattr(local, "_TERM_GRACE_S", 0.2)
    monkeypatch.setattr(local, "_KILL_WAIT_S", 0.3)


async def run_fix(command: str | None) -> None:
    """What a check has printed, run by a shell of this machine as a person would."""
    assert command is not None
    shell = await asyncio.create_subprocess_exec("/bin/sh", "-c", command)
    assert await shell.wait() == 0, command
