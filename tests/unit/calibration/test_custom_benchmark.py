"""calibrate_node: a benchmark of the caller's own is run and its figures are taken."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.calibration import custom_benchmark
from engine.calibration.custom_benchmark import calibrate_node
from engine.measurements import HardwareMetrics

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


@pytest.mark.parametrize("value", ["a\nb", "a; rm -rf ~", "$(id)", "-n", "a\0", "a\u2028b", "a b" * 40 + "|"])
def test_a_name_of_another_form_is_refused_before_anything_runs(tmp_path: Path, value: str) -> None:
    for field in CONFIG:
        with pytest.raises(ValueError, match=field):
            calibrate_node({**CONFIG, field: value}, tmp_path / "none.py")
    with pytest.raises(ValueError, match="node_id"):
        HardwareMetrics(value, "m", 1.0, 1.0, 1.0, datetime.now(UTC))
    with pytest.raises(ValueError, match="model_name"):
        HardwareMetrics("n", value, 1.0, 1.0, 1.0, datetime.now(UTC))


@pytest.mark.parametrize(
    "model", ["mlx-community/Qwen3-0.6B-4bit", "~/models/Qwen 3 (mlx)", "/Volumes/é/m", "qwen@main"]
)
def test_the_name_of_a_model_may_be_that_of_the_hub_or_a_path(tmp_path: Path, model: str) -> None:
    program = benchmark(tmp_path, f"print({GOOD!r})")
    assert calibrate_node({**CONFIG, "model_name": model}, program).model_name == model


@pytest.mark.parametrize("config", [None, [], "x", 5, b"x", [("node_id", "a")]])
def test_a_configuration_that_is_no_table_is_a_value_error(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ValueError, match=r"node_config = .*must be a table"):
        calibrate_node(config, tmp_path / "none.py")


def test_a_path_or_duration_of_another_type_is_a_value_error(tmp_path: Path) -> None:
    for path in (None, 5, b"bench.py", ["bench.py"]):
        with pytest.raises(ValueError, match="benchmark_path"):
            calibrate_node(CONFIG, path)  # type: ignore[arg-type]
    for duration in (None, "5", 0, -1, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="duration_s"):
            calibrate_node(CONFIG, tmp_path / "none.py", duration_s=duration)  # type: ignore[arg-type]


def test_metrics_may_be_made_in_a_module_that_imports_datetime_itself() -> None:
    program = "import datetime; from engine import HardwareMetrics\n"
    program += "print(HardwareMetrics('n', 'm', 1.0, 1.0, 1.0, datetime.datetime.now()).node_id)"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"n\n"


HOSTILE = [None, 5, 1.5, True, b"x", "x", [None], ["x"], [[1]], {"a": 1}, object(), float("nan"), 10**400, "\ud800"]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
def test_the_functions_for_other_tools_refuse_what_is_of_another_type_with_a_value_error(value: Any) -> None:
    for function in (engine.calculate_workload_distribution, engine.validate_worker_consistency):
        with pytest.raises(ValueError, match=r"must be a list of|there are no"):
            function(value)
    if not isinstance(value, dict):
        with pytest.raises(ValueError, match="must be a table"):
            engine.audit_log("event", "ok", value)


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
