"""What was last seen of a node is there for the next console, as old as it is."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engine.models import Interface, NodeFacts
from engine.store.storage import decode, encode
from engine.store.store import FACTS_LIMIT, Store
from tests.unit.store.records import record

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def facts(node: str, minute: int = 0, **fields: Any) -> NodeFacts:
    return NodeFacts(node=node, host=f"{node}.local", probed_at=NOW + timedelta(minutes=minute), **fields)


def test_facts_come_back_as_they_were_and_the_runs_stay(home: Path) -> None:
    whole = facts("a", chip="Apple M3 Ultra", interfaces=(Interface(name="en5", ipv4=("192.168.0.1/30",)),))
    store = Store(home)
    store.put_run(record(1))
    store.put_facts("studio", [whole, facts("b")])
    assert Store(home).last_facts("studio") == [whole, facts("b")]
    assert Store(home).last_facts("other") == []
    assert [run.id for run in Store(home).runs()] == ["run-00001"]


def test_a_later_probe_takes_the_place_and_one_without_an_answer_does_not(home: Path) -> None:
    Store(home).put_facts("studio", [facts("a", 0, mlx="0.32.1", chip="Apple M4")])
    Store(home).put_facts("studio", [facts("a", 1, mlx="0.32.4")])
    Store(home).put_facts("studio", [facts("a", 2, problem="no answer on port 22")])
    assert Store(home).last_facts("studio") == [facts("a", 1, mlx="0.32.4")]


def test_a_probe_that_saw_nothing_writes_nothing(home: Path) -> None:
    Store(home).put_facts("studio", [facts("a", problem="no answer")])
    assert not home.exists()


def test_clusters_with_nodes_of_the_same_name_are_apart(home: Path) -> None:
    Store(home).put_facts("one", [facts("a", mlx="1")])
    Store(home).put_facts("two", [facts("a", mlx="2")])
    assert [found.mlx for found in Store(home).last_facts("one")] == ["1"]


def test_the_file_does_not_grow_without_end(home: Path) -> None:
    store = Store(home)
    for minute in range(3):
        store.put_facts(f"c{minute}", [facts(f"n{number}", minute) for number in range(FACTS_LIMIT // 2)])
    assert store.last_facts("c0") == []
    assert len(store.last_facts("c1")) == len(store.last_facts("c2")) == FACTS_LIMIT // 2


def test_facts_that_cannot_be_read_are_left_out_with_a_notice(home: Path) -> None:
    Store(home).put_facts("studio", [facts("a"), facts("b")])
    path = home / "state.json"
    tables = decode(path.read_bytes())
    tables["facts"]["studio/a"]["interfaces"] = "none"
    path.write_bytes(encode(json.loads(json.dumps(tables))))
    store = Store(home)
    assert [found.node for found in store.last_facts("studio")] == ["b"]
    assert len(store.notices) == 1 and "facts of node 'a' are left out" in store.notices[0]
