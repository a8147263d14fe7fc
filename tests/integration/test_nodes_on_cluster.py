"""`flightdeck nodes` on real nodes over ssh, one of which shows a key that nobody has accepted yet."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import unknown, write_config
from tests.tui.commands import FLIGHTDECK, accepting, environment, flightdeck

PATIENCE_S = 30.0


@pytest.fixture
def studio(cluster: Cluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configuration of two of the nodes."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    return write_config(cluster, tmp_path / "flightdeck.toml", "ana", "bea").parent


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[str]:
    """ana, whose key nobody has accepted."""
    with unknown(cluster, "ana") as node:
        yield node


def asked_at_a_terminal(home: Path, studio: Path, before: bytes, answer: bytes) -> tuple[int, str]:
    """The exit code and what was said to a person who types `before` ahead, and `answer` when asked."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, before)
        with subprocess.Popen(
            [FLIGHTDECK, *accepting(["nodes"])],
            cwd=studio,
            env=environment(home),
            stdin=theirs,
            stderr=theirs,
            stdout=subprocess.PIPE,
        ) as process:
            output = b""
            while b"[y/N]" not in output:
                output += os.read(ours, 4096)
            os.write(ours, answer)
            process.communicate(timeout=PATIENCE_S)
        return process.returncode, output.decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_new_key_is_accepted_by_whoever_has_seen_it_and_by_nobody_else(
    cluster: Cluster, home: Path, studio: Path, stranger: str
) -> None:
    # What is typed ahead is no answer to a question that nobody has seen yet.
    refused, output = asked_at_a_terminal(home, studio, b"y\n", b"n\n")
    fingerprint = output.partition("accept ")[2].split()[0]
    assert refused == 1 and f"accept {fingerprint} for {stranger}? [y/N]" in output
    assert not (home / "known_hosts").exists()
    done = flightdeck(home, "nodes", "--trust", fingerprint, "--json", cwd=studio)
    assert (done.code, f"accepted {fingerprint} for {stranger}" in done.err) == (0, True)
    reported = json.loads(done.out)
    assert [node["hostname"] for node in reported["nodes"]] == ["ana", "bea"]
    assert reported["network"]["backend"] == "ring"
