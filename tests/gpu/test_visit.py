"""A visit to a GPU machine keeps what its parts show, however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.node import processes
from tests.gpu.part import ROOT
from tests.gpu.results import (
    RECORDINGS,
    RESULTS,
    TABLE,
    Row,
    append_line,
    append_row,
    is_failure,
    newest,
    read_rows,
    table,
    write_table,
)
from tests.gpu.visit import VisitRunner, choose
from tests.waiting import wait_until

PLANTED = {"json": "tests.gpu.planted_parts"}
"""A framework that every python has."""


def visit(out: Path, *names: str, dry: bool = True) -> tuple[int, dict[str, Row]]:
    """The exit code, and the newest row that tells how each part ended."""
    code = VisitRunner(out, dry, 120.0).run(choose(names, PLANTED))
    return code, {row.part: row for row in newest(read_rows(out)) if row.name == ""}


def test_each_end_of_a_part_is_told_and_the_visit_goes_on(tmp_path: Path) -> None:
    code, ends = visit(tmp_path)
    assert code == 1
    assert {name: row.status for name, row in ends.items()} == {
        "long": "not run",
        "measures": "ended",
        "misses": "ended",
        "hangs": "failed",
        "dies": "failed",
        "lacks": "cannot",
        "raises": "failed",
        "says-nothing": "failed",
        "calls": "ended",
    }
    assert ends["hangs"].note == "killed at its limit of 1.5 s"
    assert "SIGKILL" in ends["dies"].note
    assert ends["lacks"].note == "this machine has one GPU"
    assert ends["raises"].note == "ValueError: a wrong figure"
    assert "1000 s" in ends["long"].note
    figures = {(row.part, row.name): row for row in read_rows(tmp_path) if row.part and row.name}
    assert figures["dies", "before"].value == 1
    assert {row.status for row in figures.values() if row.part == "calls"} == {"ok"}
    pids = [int(pid) for pid in str(figures["hangs", "pids"].value).split()]
    assert [processes.known_start(pid) for pid in pids] == ["", "", ""]
    recorded = [json.loads(line) for line in (tmp_path / RECORDINGS).read_text().splitlines()]
    assert [line["name"] for line in recorded] == ["card", "traceback"]
    written = (tmp_path / TABLE).read_text()
    assert "| measures | speed | 12.5 tokens/s | >= 10 | ok |" in written
    assert "| misses | speed | 8 tokens/s | >= 10 | failed |" in written
    assert "| long | takes longer than the visit |  |  | not run: " in written
    assert "dry" in written.splitlines()[0]
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.parametrize(("name", "dry", "code"), [("measures", False, 0), ("lacks", True, 0), ("lacks", False, 1)])
def test_what_a_machine_lacks_is_no_success_where_a_gpu_was_expected(
    tmp_path: Path, name: str, dry: bool, code: int
) -> None:
    assert visit(tmp_path, name, dry=dry)[0] == code


def test_the_groups_take_turns() -> None:
    """In a visit with too little time for all, each has its first parts."""
    names = [each.framework for each in choose(["measures", "misses"], {**PLANTED, "csv": PLANTED["json"]})]
    assert names == ["json", "csv", "json", "csv"]


def test_a_part_without_its_framework_cannot_run(tmp_path: Path) -> None:
    chosen = choose(["measures"], {"no_such_framework": "tests.gpu.planted_parts"})
    assert VisitRunner(tmp_path, False, 60.0).run(chosen) == 1
    assert [row.status for row in read_rows(tmp_path) if row.part] == ["cannot"]


def test_a_signal_ends_the_visit_and_the_table_is_written(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from tests.gpu.visit import VisitRunner, choose\n"
        "chosen = choose(['long', 'measures'], {'json': 'tests.gpu.planted_parts'})\n"
        "sys.exit(VisitRunner(pathlib.Path(sys.argv[1]), True, 2000.0).run(chosen))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: any(row.name == "begun" for row in read_rows(tmp_path)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    ends = {row.part: row for row in read_rows(tmp_path) if row.part and not row.name}
    assert {name: row.status for name, row in ends.items()} == dict.fromkeys(("long", "measures"), "not run")
    assert "SIGTERM" in ends["measures"].note
    assert "| measures |" in (tmp_path / TABLE).read_text()


def test_a_later_visit_adds_and_its_values_count(tmp_path: Path) -> None:
    append_row(tmp_path, Row("2026-01-01 10:00:00", "1", "part", "speed", "failed", 8))
    append_row(tmp_path, Row("2026-01-01 10:00:01", "1", "part", "memory", "ok", 2.0))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"torn": \n')
    append_row(tmp_path, Row("2026-01-02 10:00:00", "2", "part", "speed", "ok", 12))
    assert not any(map(is_failure, newest(read_rows(tmp_path))))
    assert table(read_rows(tmp_path)).splitlines()[2:] == [
        "| part | speed | 12 |  | ok | 2026-01-02 10:00 |",
        "| part | memory | 2 |  | ok | 2026-01-01 10:00 |",
    ]


def test_a_full_disk_ends_no_visit_and_spoils_no_later_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_line(Path("/dev/full"), {"name": "speed", "value": 12})
    assert '"value": 12' in capsys.readouterr().out
    (tmp_path / RESULTS).write_text('{"time": "2026-01-01 10:0')
    append_row(tmp_path, Row("2026-01-02 10:00:00", "2", "part", "speed", "ok", 12, note="of\u2028two lines"))
    assert [row.value for row in read_rows(tmp_path)] == [12]
    (tmp_path / TABLE).mkdir()
    assert "| part | speed | 12 |" in write_table(tmp_path)


def test_the_command_runs_a_part_on_the_cpu_build_and_keeps_dry_results_apart(tmp_path: Path) -> None:
    def command(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tests.gpu", "--only", "mlx.attention", "--out", str(tmp_path), *options]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, env=dict(os.environ))

    done = command("--dry")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| mlx.attention | heads of 64: " in done.stdout
    assert command().returncode == 2
    assert command("--only", "no-such-part").returncode == 2
