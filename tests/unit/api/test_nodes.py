"""Facts through the Engine: probed, stored, and there for the next console."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.api import Engine
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import StateError
from tests.damage import make_irregular


def config(workdir: Path, *names: str) -> Config:
    nodes = [NodeConfig(name=name, python=sys.executable, workdir=str(workdir)) for name in names]
    return Config(cluster=ClusterConfig(name="desk"), nodes=tuple(nodes), job=JobConfig(name="job"))


async def test_what_the_probe_saw_is_there_for_the_next_console(home: Path, tmp_path: Path) -> None:
    two = config(tmp_path, "a", "b")
    engine = Engine(home)
    assert engine.nodes.last_facts(two) == []
    found = await engine.nodes.probe(two)
    assert [(facts.node, facts.problem) for facts in found] == [("a", None), ("b", None)]
    assert Engine(home).nodes.last_facts(two) == found
    assert Engine(home).nodes.last_facts(config(tmp_path, "b", "c")) == [found[1]]
    moved = two.model_copy(update={"nodes": (two.nodes[0].model_copy(update={"ssh": "elsewhere"}),)})
    assert Engine(home).nodes.last_facts(moved) == []
    await engine.close()


@pytest.mark.parametrize("kind", ["bytes", "fifo", "directory", "socket"])
def test_accepted_files_that_are_damaged_are_as_none_and_named_when_written(
    home: Path, tmp_path: Path, kind: str
) -> None:
    nodes, file = Engine(home).nodes, home / "accepted-files"
    foreign = config(tmp_path, "a").model_copy(update={"file": tmp_path / "flightdeck.toml", "digest": "d" * 64})
    foreign = foreign.model_copy(update={"nodes": (foreign.nodes[0].model_copy(update={"python": "/opt/python"}),)})
    home.mkdir(mode=0o700, exist_ok=True)
    make_irregular(file, kind)
    assert not nodes.is_accepted(foreign)
    if kind == "bytes":
        nodes.accept(foreign.digest)
        assert nodes.is_accepted(foreign)
    else:
        with pytest.raises(StateError, match=r"cannot be kept: it is (a directory|not a regular file)"):
            nodes.accept(foreign.digest)


async def test_the_machine_alone_is_wired_as_a_ring_on_loopback(home: Path, tmp_path: Path) -> None:
    engine, two = Engine(home), config(tmp_path, "a", "b")
    found = await engine.nodes.probe(two)
    assert engine.nodes.topology(found).shape == "single"
    network = engine.nodes.network_plan(two, found)
    assert (network.backend, [host.ips for host in network.hosts]) == ("ring", [("127.0.0.1",)] * 2)
    await engine.close()


async def test_an_iterator_that_is_closed_early_keeps_what_had_come(home: Path, tmp_path: Path) -> None:
    engine, two = Engine(home), config(tmp_path, "a")
    answers = engine.nodes.probe_each(two)
    first = await anext(answers)
    await answers.aclose()  # type: ignore[attr-defined]
    assert engine.nodes.last_facts(two) == [first]
    await engine.close()


@pytest.mark.parametrize(
    "shell", ["sh", *(pytest.param(each, marks=pytest.mark.needs(each)) for each in ("zsh", "fish", "tcsh"))]
)
def test_a_fix_in_a_terminal_passes_any_login_shell(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    found = subprocess.run(["/bin/sh", "-c", f"command -v {shell}"], capture_output=True, text=True, check=True)
    monkeypatch.setenv("SHELL", found.stdout.strip())
    monkeypatch.setenv("HOME", str(tmp_path))
    here = config(tmp_path, "a")
    there = here.model_copy(update={"nodes": (here.nodes[0].model_copy(update={"ssh": "mac"}),)})
    line = Engine(home).nodes.fix_argv(there, "a", "pwd >'a file'")[-1]
    # As sshd does.
    subprocess.run([shell, "-c", line], check=True)
    assert (tmp_path / "a file").read_text() == f"{tmp_path}\n"
