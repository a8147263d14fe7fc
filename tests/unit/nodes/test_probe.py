"""A node is asked once and answers with facts, or with the reason why it did not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.config.models import NodeConfig
from engine.nodes.probe import SCRIPT, probe, read_facts
from engine.transport.base import Completed

NOW = datetime(2026, 11, 21, tzinfo=UTC)
Script = Callable[[str], NodeConfig]


@pytest.fixture
def scripted(tmp_path: Path) -> Script:
    """A node whose python is a shell script with this body."""

    def node(body: str) -> NodeConfig:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
        return NodeConfig(name="ultra", python=str(python), workdir=str(tmp_path))

    return node


async def test_this_machine(tmp_path: Path) -> None:
    facts = await probe(
        NodeConfig(name="here", python=sys.executable, workdir=str(tmp_path / "not" / "yet")), clock=lambda: NOW
    )
    assert (facts.node, facts.host, facts.probed_at, facts.problem) == ("here", "127.0.0.1", NOW, None)
    assert facts.python == platform.python_version()
    assert facts.mlx == importlib.metadata.version("mlx")
    assert facts.mlx_lm == importlib.metadata.version("mlx-lm")
    assert facts.gpu in ("cpu", "gpu")
    assert "ring" in facts.backends
    assert facts.os and facts.chip and facts.cores
    assert facts.memory_total_bytes and facts.memory_used_bytes and facts.disk_free_bytes
    assert 0 < facts.memory_used_bytes < facts.memory_total_bytes
    if sys.platform == "linux":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert facts.memory_total_bytes == pytest.approx(pages, rel=0.01)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("echo 'dyld: Library not loaded' >&2; exit 134", "the probe ended with 134: dyld: Library not loaded"),
        ("exit 0", "the probe ended with 0"),
        ("printf '\\033]0;owned\\007gone\\n' >&2; exit 1", "the probe ended with 1: gone"),
        ("echo '[1, 2]'; echo nonsense; exit 0", "the probe ended with 0: nonsense"),
    ],
)
async def test_an_interpreter_that_fails_is_a_problem_in_one_line(scripted: Script, body: str, problem: str) -> None:
    facts = await probe(scripted(body))
    assert facts.problem == problem
    assert [facts.python, facts.mlx, facts.cores] == [None] * 3


async def test_an_interpreter_that_hangs_is_given_up(scripted: Script) -> None:
    facts = await probe(scripted("sleep 600"), time_limit_s=0.2)
    assert "within 0.2 s" in (facts.problem or "")


async def test_an_interpreter_that_is_not_there_or_is_no_program_is_named(tmp_path: Path) -> None:
    facts = await probe(NodeConfig(name="a", python="/nonexistent/python", workdir="/"))
    assert facts.problem == "no such interpreter: /nonexistent/python"
    (tmp_path / "python").write_text("")
    facts = await probe(NodeConfig(name="a", python=str(tmp_path / "python"), workdir="/"))
    assert "cannot be run" in (facts.problem or "")


async def test_an_answer_that_makes_no_sense_is_a_problem(scripted: Script) -> None:
    facts = await probe(scripted("""echo '{"system": "Linux", "cores": "many"}'"""))
    assert "cores" in (facts.problem or "")


def test_an_mlx_that_crashes_on_import_costs_its_own_facts_only() -> None:
    line = json.dumps({"system": "Linux", "python": "3.12.1", "mlx": "0.32.4", "cores": 8, "texts": {}})
    facts = read_facts(Completed(-11, b"noise of a .bashrc\n" + line.encode() + b"\n", b""))
    assert (facts["python"], facts["mlx"], facts["gpu"], facts["backends"]) == ("3.12.1", "0.32.4", None, ())


def test_a_macs_answer_is_read_with_macos_words() -> None:
    texts = {
        "sysctl": "hw.memsize: 34359738368\nmachdep.cpu.brand_string: Apple M2 Pro\n",
        "sw_vers": None,
        "vm_stat": "",
    }
    line = json.dumps({"system": "Darwin", "python": "3.12.1", "texts": texts})
    facts = read_facts(Completed(0, line.encode(), b""))
    assert (facts["chip"], facts["memory_total_bytes"], facts["os"]) == ("Apple M2 Pro", 32 * 2**30, None)


def test_the_script_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """With -S and -I neither mlx nor anything else is installed, as on a node that has not been set up."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=True
    )
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["mlx"] is None
    assert "No module named 'mlx'" in second["mlx_problem"]
