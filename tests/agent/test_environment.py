"""The `environment` probe: what it is asked is in no file, and nothing that it has started outlives it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.node.environment import MARKER
from engine.node.processes import alive, known_start

SECRET = "hunter22"


@pytest.fixture
def uv(tmp_path: Path) -> Path:
    """It makes an environment of a link to this python; an installation tells its pid, and then waits for stdin's end
    and for a file."""
    script = tmp_path / "uv"
    script.write_text(f"""#!/bin/sh
if [ "$1" = venv ]; then mkdir -p "$5/bin"; ln -s {sys.executable} "$5/bin/python"; exit; fi
echo "pid $$"; sed 's/.*@/line of /'
case "$*" in *--find-links*) while [ ! -e {tmp_path}/go ]; do sleep 0.05; done ;; esac
""")
    script.chmod(0o700)
    return script


@contextlib.contextmanager
def probe(folder: Path, uv: Path, **request: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "engine.node.probes", "environment"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        lines = [f"--index-url https://ana:{SECRET}@index.local/simple", "tiny==1"]
        asked = {"python": "3.12", "uv": str(uv), "requirements": lines, "wheels": None, **request}
        process.stdin.write(json.dumps({"folder": str(folder), **asked}).encode() + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def report(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def has_secret(folder: Path) -> bool:
    return any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_it_is_made_of_what_came_over_its_stdin_and_then_is_there(tmp_path: Path, uv: Path) -> None:
    folder = tmp_path / "node" / "0123456789abcdef"
    with probe(folder, uv) as process:
        assert report(process)["line"].startswith("pid ")
        assert report(process) == {"line": "line of index.local/simple"} and report(process) == {"line": "tiny==1"}
        made = report(process)["made"]
    assert made["id"] == folder.name and "pytest" in made["packages"]
    assert json.loads((folder / MARKER).read_text()) == made
    (wheels := tmp_path / "node" / "0123456789abcdef.wheels").mkdir()
    with probe(folder, uv, wheels=str(wheels)) as process:
        assert report(process) == {"made": made}
    assert not wheels.exists(), "another head has made it meanwhile"
    assert not has_secret(tmp_path / "node")


def test_one_that_cannot_be_made_leaves_nothing(tmp_path: Path, uv: Path) -> None:
    folder = tmp_path / "node" / "0123456789abcdef"
    uv.write_text(uv.read_text() + "echo no such package; exit 1\n")
    with probe(folder, uv) as process:
        while "line" in (answer := report(process)):
            assert answer["line"]
    assert "no such package" in answer["problem"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.with_suffix(".lock").name]


def test_one_that_is_killed_while_it_waits_for_another_has_left_no_requirements(tmp_path: Path, uv: Path) -> None:
    folder = tmp_path / "node" / "0123456789abcdef"
    folder.parent.mkdir()
    with folder.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with probe(folder, uv) as process:
            assert report(process) == {"line": "another head makes it: waiting for its end"}
    assert not has_secret(tmp_path / "node") and not folder.exists()


@pytest.mark.parametrize("how", ["kill", "stdin"])
def test_what_it_has_started_ends_with_it(tmp_path: Path, uv: Path, how: str) -> None:
    folder = tmp_path / "node" / "0123456789abcdef"
    with probe(folder, uv, wheels=str(tmp_path / "wheels")) as process:
        pid = int(report(process)["line"].split()[1])
        started = known_start(pid)
        assert process.stdin is not None
        process.kill() if how == "kill" else process.stdin.close()
        process.wait()
    while alive(pid, started) or folder.exists():
        time.sleep(0.01)
    assert [path.name for path in folder.parent.iterdir()] == [folder.with_suffix(".lock").name], "nothing half made"


def test_the_end_of_one_that_waited_takes_nothing_from_the_other_head(tmp_path: Path, uv: Path) -> None:
    folder = tmp_path / "node" / "0123456789abcdef"
    with probe(folder, uv, wheels=str(tmp_path / "wheels")) as maker:
        assert report(maker)["line"].startswith("pid ")
        with probe(folder, uv) as waiting:
            assert report(waiting) == {"line": "another head makes it: waiting for its end"}
        time.sleep(0.3)
        (tmp_path / "go").touch()
        while "line" in (answer := report(maker)):
            assert answer["line"]
    assert answer["made"]["id"] == folder.name


def test_why_none_is_made_is_told(tmp_path: Path, uv: Path) -> None:
    uv.write_text("#!/bin/sh\necho no solution; exit 1\n")
    with probe(tmp_path / "node" / "a", uv) as process:
        assert [report(process), report(process)] == [
            {"line": "no solution"},
            {"problem": "no environment is made: no solution"},
        ]
    with probe(tmp_path / "node" / "a", tmp_path / "none") as process:
        assert report(process) == {"problem": "no environment is made: No such file or directory"}
