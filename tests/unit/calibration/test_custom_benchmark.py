"""calibrate_node: a benchmark of the caller's own is run and its figures are taken."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.calibration import custom_benchmark
from engine.calibration.custom_benchmark import calibrate_node

CONFIG = {"node_id": "a", "model_name": "qwen"}
GOOD = '{"throughput": 0.85, "memory_gb": 98.5, "latency_ms": 1176}'


def benchmark(tmp_path: Path, text: str, name: str = "bench.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_its_figures_are_taken(tmp_path: Path) -> None:
    found = calibrate_node(CONFIG, benchmark(tmp_path, f"print({GOOD!r})"), duration_s=5)
    assert (found.node_id, found.model_name) == ("a", "qwen")
    assert (found.throughput, found.memory_gb, found.latency_ms) == (0.85, 98.5, 1176)
    assert found.timestamp.tzinfo is not None


def test_it_gets_the_node_the_model_and_the_time(tmp_path: Path) -> None:
    output = "import json, sys; print(json.dumps({'throughput': len(sys.argv), 'memory_gb': float(sys.argv[-1])} "
    text = output + "| {'latency_ms': int(sys.argv[2:5:2] == ['a', 'qwen'])}))"
    found = calibrate_node(CONFIG, str(benchmark(tmp_path, text)), duration_s=7)
    assert (found.throughput, found.memory_gb, found.latency_ms) == (7, 7, 1)


def test_a_program_is_run_as_it_is(tmp_path: Path) -> None:
    path = benchmark(tmp_path, f"#!/bin/sh\necho '{GOOD}'\n", "bench")
    path.chmod(0o700)
    assert calibrate_node(CONFIG, path, duration_s=5).throughput == 0.85


def test_no_throughput_is_an_offline_node_and_no_error(tmp_path: Path) -> None:
    text = f"print({GOOD.replace('0.85', '0')!r})"
    assert calibrate_node(CONFIG, benchmark(tmp_path, text)).throughput == 0


@pytest.mark.parametrize("field", ["node_id", "model_name"])
@pytest.mark.parametrize("value", [None, "", "  ", 5])
def test_a_field_that_is_missing_or_no_text_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        calibrate_node({**CONFIG, field: value}, benchmark(tmp_path, "raise SystemExit(9)"))
    with pytest.raises(ValueError, match=field):
        calibrate_node({key: text for key, text in CONFIG.items() if key != field}, tmp_path / "none.py")


@pytest.mark.parametrize(
    ("printed", "why"),
    [
        ("all went well", "no JSON object"),
        ("", "no JSON object"),
        ("[1]", "no JSON object but list"),
        ('{"throughput": 1, "memory_gb": 1}', "no latency_ms"),
        (GOOD.replace("0.85", "-0.1"), "throughput"),
        (GOOD.replace("98.5", "-1"), "memory_gb"),
        (GOOD.replace("1176", "-2"), "latency_ms"),
        (GOOD.replace("1176", '"fast"'), "latency_ms"),
        (GOOD.replace("1176", "NaN"), "latency_ms"),
    ],
)
def test_an_output_that_is_none_is_a_value_error(tmp_path: Path, printed: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        calibrate_node(CONFIG, benchmark(tmp_path, f"print({printed!r})"))


def test_a_failure_has_its_exit_code_and_stderr(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3: .*no GPU"):
        calibrate_node(CONFIG, benchmark(tmp_path, "import sys; print('no GPU', file=sys.stderr); sys.exit(3)"))


def test_one_that_does_not_end_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_benchmark, "_ALLOWANCE_S", 0.5)
    child = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no end after 0.6 s"):
        calibrate_node(CONFIG, benchmark(tmp_path, child), duration_s=0.1)
    assert time.monotonic() - began < 10


def test_what_other_tools_call_is_there_under_the_engines_own_name() -> None:
    assert engine.calibrate_node is calibrate_node
    for name in engine.__all__:
        assert getattr(engine, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        engine.nothing_of_the_kind  # noqa: B018
