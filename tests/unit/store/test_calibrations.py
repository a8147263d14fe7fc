"""What was measured is there for the next launch, as old as it is."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engine.measurements import Calibration, LinkMeasure, MemoryProbe, NodeMeasure
from engine.models import NodeFacts
from engine.store.storage import decode, encode
from engine.store.store import CALIBRATIONS_LIMIT, Store
from tests.unit.store.records import record

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def taken(fingerprint: str, minute: int = 0, cluster: str = "studio", **fields: Any) -> Calibration:
    at = NOW + timedelta(minutes=minute)
    return Calibration(cluster=cluster, job="job", fingerprint=fingerprint, taken_at=at, **fields)


def test_it_comes_back_as_it_was_and_the_other_tables_stay(home: Path) -> None:
    probes = (MemoryProbe(batch=1, peak_bytes=5), MemoryProbe(batch=2, peak_bytes=9))
    node = NodeMeasure(node="a", host="a.local", examples_per_s=0.0, spread=0.02, probes=probes, qos="not on macOS")
    link = LinkMeasure(nodes=("a", "b"), latency_s=4.8e-5, bandwidth_bytes_per_s=8.1e9)
    whole = taken("f", nodes=(node,), links=(link,), all_ranks=link, gradient_bytes=7, notes=("a note",))
    store = Store(home)
    store.put_run(record(1))
    store.put_facts("studio", [NodeFacts(node="a", host="a.local", probed_at=NOW)])
    store.put_calibration(whole)
    assert Store(home).calibrations("studio") == [whole]
    assert Store(home).calibrations("other") == []
    assert len(Store(home).runs()) == len(Store(home).last_facts("studio")) == 1


def test_the_newest_comes_first_and_takes_the_place_of_its_own_kind(home: Path) -> None:
    for one in (taken("f", 0), taken("g", 5), taken("f", 9), taken("f", 7, cluster="two")):
        Store(home).put_calibration(one)
    assert Store(home).calibrations("studio") == [taken("f", 9), taken("g", 5)]


def test_the_file_does_not_grow_without_end(home: Path) -> None:
    for minute in range(CALIBRATIONS_LIMIT + 3):
        Store(home).put_calibration(taken(f"f{minute}", minute))
    found = Store(home).calibrations("studio")
    assert len(found) == CALIBRATIONS_LIMIT
    assert [found[0].fingerprint, found[-1].fingerprint] == [f"f{CALIBRATIONS_LIMIT + 2}", "f3"]


def test_one_that_cannot_be_read_is_left_out_with_a_notice(home: Path) -> None:
    Store(home).put_calibration(taken("f"))
    Store(home).put_calibration(taken("g"))
    path = home / "state.json"
    tables = decode(path.read_bytes())
    tables["calibrations"]["studio/f"]["nodes"] = "none"
    path.write_bytes(encode(json.loads(json.dumps(tables))))
    store = Store(home)
    assert [found.fingerprint for found in store.calibrations("studio")] == ["g"]
    assert len(store.notices) == 1 and "a calibration of job 'job' is left out" in store.notices[0]
