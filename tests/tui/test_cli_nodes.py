"""`flightdeck nodes`: a probe of every node, and host keys that only a person accepts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from engine.api import Engine
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import InputError, LaunchError
from engine.models import HostKeyChange, HostKeyOffer, NodeFacts, Topology
from engine.plan.network import NetworkPlan
from tests.tui.commands import flightdeck
from tui.commands.nodes import nodes
from tui.commands.terminal import Lines

NEW = HostKeyOffer(target="ana@ultra", key="ssh-ed25519 AAAA", fingerprint="SHA256:new")


def facts(node: str, **more: Any) -> NodeFacts:
    known = {"mlx": "0.32.4", "mlx_lm": "0.32.2", "python": "3.11.9", "memory_total_bytes": 512_000_000_000}
    values = more if "problem" in more else {**known, **more}
    return NodeFacts(node=node, host=f"{node}.local", probed_at=datetime.now(UTC), **values)


@dataclass
class FakeCluster:
    """An engine whose nodes accept a key as a person does."""

    found: list[NodeFacts]
    unwired: str | None = None
    accepted: list[str] = field(default_factory=list)
    setup: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ran: Path | None = None
    """Where the set-up commands note that they ran."""
    closed: int = 0

    def load_config(self, path: Path, overrides: Any = None) -> Config:
        named = tuple(NodeConfig(name=f.node, ssh=f.host, python="python3", workdir="~") for f in self.found)
        return Config(cluster=ClusterConfig(), nodes=named, job=JobConfig(name="mine", command=("true",)))

    def is_accepted(self, config: Config, *, launch: bool) -> bool:
        return True

    async def probe(self, config: Config) -> list[NodeFacts]:
        return [
            facts(f.node) if f.host_key is not None and f.host_key.fingerprint in self.accepted else f
            for f in self.found
        ]

    async def accept_host_key(self, offer: HostKeyOffer) -> None:
        self.accepted.append(offer.fingerprint)

    def last_facts(self, config: Config) -> list[NodeFacts]:
        return [
            facts(f.node).model_copy(update={"probed_at": datetime.now(UTC) - timedelta(minutes=190)})
            for f in self.found
        ]

    def topology(self, found: list[NodeFacts]) -> Topology:
        ran = self.ran.read_text().split() if self.ran is not None and self.ran.exists() else []
        setup = {node: commands for node, commands in self.setup.items() if node not in ran}
        return Topology(nodes=tuple(f.node for f in found), setup=setup)

    def setup_argv(self, config: Config, node: str, commands: Sequence[str]) -> list[str]:
        return ["/bin/sh", "-c", f"echo {node} >>{self.ran}; exit {len(commands) - 1}"]

    def network_plan(self, config: Config, found: list[NodeFacts]) -> NetworkPlan:
        if self.unwired:
            raise LaunchError(self.unwired)
        return NetworkPlan(backend="ring", hosts=(), reasons=("all share 10.0.0.0/24",))

    async def close(self) -> None:
        self.closed += 1

    async def __aenter__(self) -> FakeCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def part(self) -> FakeCluster:
        """Every part of the Engine at once."""
        return self

    nodes = part

    def run(self, *trust: str, json: bool = False, setup: bool = False) -> int:
        options = argparse.Namespace(config=Path("x.toml"), trust=list(trust), json=json, setup=setup, set=[])
        return nodes(options, cast("Engine", self))


@pytest.fixture
def strange() -> FakeCluster:
    """Two nodes, one with a host key that nobody has accepted."""
    return FakeCluster([facts("max"), facts("ultra", problem="the host key is not known", problem_kind="key unknown",
                                        host_key=NEW)])  # fmt: skip


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Someone at a terminal, who answers what is in the list."""
    answers: list[str] = []
    monkeypatch.setattr("tui.commands.nodes.is_person", lambda stream: True)
    monkeypatch.setattr("builtins.input", lambda: answers.pop(0))
    yield answers
    assert answers == [], "every question was put"


def test_the_machine_alone_as_a_table_and_as_one_document(home: Path, tmp_path: Path) -> None:
    here = "".join(f'[[node]]\nname = "{name}"\n' for name in ("a", "b"))
    (tmp_path / "flightdeck.toml").write_text(here + '[job]\nname = "mine"\ncommand = ["true"]\n')
    shown = flightdeck(home, "nodes", cwd=tmp_path)
    assert (shown.code, shown.err) == (0, "")
    assert [line.split()[:4] for line in shown.out.splitlines()[1:3]] == [
        [str(rank), name, "ok", "127.0.0.1"] for rank, name in enumerate("ab")
    ]
    assert "backend: ring" in shown.out
    document = json.loads(flightdeck(home, "nodes", "--json", cwd=tmp_path).out)
    assert set(document) == {"nodes", "topology", "network", "network_problem"}
    assert [node["node"] for node in document["nodes"]] == ["a", "b"]
    assert (document["topology"]["shape"], document["network"]["backend"]) == ("single", "ring")


def test_without_a_terminal_nothing_is_asked_and_the_command_is_named(
    strange: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert strange.run() == 1
    output = capsys.readouterr().out
    assert "flightdeck nodes --trust SHA256:new" in output and "ssh-keygen -lf" in output
    assert (strange.accepted, strange.closed) == ([], 1)


def test_exactly_the_named_key_is_accepted(strange: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert strange.run("SHA256:other") == 1
    assert "no node shows SHA256:other" in capsys.readouterr().err
    assert strange.accepted == []
    assert strange.run("SHA256:new") == 0
    assert strange.accepted == ["SHA256:new"]
    assert "accepted SHA256:new for ana@ultra" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 1), ("n", 1), ("SHA256:new", 1)])
def test_a_person_is_asked_and_only_yes_is_yes(
    strange: FakeCluster, person: list[str], capsys: pytest.CaptureFixture[str], answer: str, code: int
) -> None:
    person.append(answer)
    assert strange.run() == code
    assert "accept SHA256:new for ana@ultra? [y/N]" in capsys.readouterr().err
    assert strange.accepted == (["SHA256:new"] if code == 0 else [])


def test_a_document_asks_nobody_unless_told_to(strange: FakeCluster, person: list[str]) -> None:
    assert strange.run(json=True) == 1
    person.append("yes")
    assert strange.run("", json=True) == 0


def test_to_be_asked_without_a_terminal_is_bad_usage(strange: FakeCluster) -> None:
    with pytest.raises(InputError, match="there is no terminal"):
        strange.run("")


def test_a_changed_key_is_never_accepted_and_both_are_shown(
    person: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    change = HostKeyChange(target="max", accepted="SHA256:old", found="SHA256:evil")
    changed = facts("max", problem="the host key has changed", problem_kind="key changed", changed_key=change,
                    fix="find out why")  # fmt: skip
    cluster = FakeCluster([changed])
    assert cluster.run("SHA256:evil") == 1
    output = capsys.readouterr()
    assert cluster.accepted == []
    assert "SHA256:old" in output.out and "SHA256:evil" in output.out and "find out why" in output.out


def test_a_node_that_is_away_is_shown_as_it_was_with_its_age(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster(
        [facts("max", problem="cannot be reached: no route", problem_kind="unreachable", fix="is it on?")]
    )
    assert cluster.run() == 1
    output = capsys.readouterr().out
    row = output.splitlines()[1]
    assert "unreachable, stale" in row and "0.32.4" in row and "3 h ago" in row
    assert "max: cannot be reached: no route" in output and "fix: is it on?" in output


def test_versions_that_differ_and_a_clock_that_is_off_stand_out(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster([facts("a"), facts("b"), facts("c", mlx="0.31.0", clock_skew_s=-7.5)])
    assert cluster.run() == 0
    output = capsys.readouterr().out
    assert "!=0.31.0" in output and "c: mlx 0.31.0, elsewhere 0.32.4" in output and "-7.5 s off" in output


def test_nodes_that_cannot_be_wired_are_a_failure_that_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster([facts("a"), facts("b")], unwired="a and b share no network")
    assert cluster.run() == 1
    assert "not wired: a and b share no network" in capsys.readouterr().out


def test_in_a_terminal_of_80_columns_nothing_is_cut_or_broken_within_a_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = facts("max", problem=f"cannot be reached: {'no route to it; ' * 8}", problem_kind="unreachable")
    cluster = FakeCluster([facts("a"), facts("b", mlx="0.31.0"), unreachable])
    cluster.run()
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 120
    monkeypatch.setattr(Lines, "width", 80)
    cluster.run()
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    rows = [line for line in whole.splitlines() if line.startswith(("RANK", "0  ", "1  "))]
    assert len(rows) == 3 and all(cell in narrow for row in rows for cell in row.split("  ") if cell)
    assert [line[:10].split() for line in narrow.splitlines() if line.startswith("1 ")] == [["1", "b"]] * (
        narrow.count("RANK  NODE")
    )


@pytest.fixture
def cabled(tmp_path: Path) -> FakeCluster:
    """Two Macs whose cable has no network of its own; the second's commands end with 1."""
    setup = {"a": ("sudo ifconfig bridge0 down",), "b": ("sudo ifconfig bridge0 down", "sudo ifconfig en3 inet …")}
    return FakeCluster([facts("a"), facts("b")], setup=setup, ran=tmp_path / "ran")


def test_the_commands_that_give_cables_a_network_are_shown(
    cabled: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cabled.run() == 0
    output = capsys.readouterr().out
    assert "`flightdeck nodes --setup` runs these commands" in output
    assert "on b:\n  sudo ifconfig bridge0 down\n  sudo ifconfig en3 inet …\n" in output


def test_setup_asks_runs_on_every_node_and_probes_again(
    cabled: FakeCluster, person: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    person.append("y")
    assert cabled.run(setup=True) == 0
    assert cabled.ran is not None and cabled.ran.read_text() == "a\nb\n"
    shown = capsys.readouterr()
    assert "run these commands on the nodes, with sudo? [y/N]" in shown.err and "ended with 1" in shown.err
    assert "no network of their own" not in shown.out
    assert cabled.run(setup=True) == 0
    assert "nothing to set up" in capsys.readouterr().err


def test_a_setup_that_is_declined_runs_nothing_and_is_not_done(cabled: FakeCluster, person: list[str]) -> None:
    person.append("")
    assert cabled.run(setup=True) == 1
    assert cabled.ran is not None and not cabled.ran.exists()


def test_setup_without_a_terminal_is_bad_usage(cabled: FakeCluster) -> None:
    with pytest.raises(InputError, match="there is no terminal"):
        cabled.run(setup=True)
