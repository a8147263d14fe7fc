"""The console process stays light: what it imports is checked in a fresh interpreter, not by reading code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    probe = f"{statement}\nimport sys\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_session_never_imports_mlx_or_a_frontend() -> None:
    assert not imported_by("import engine.api") & {"mlx", "mlx_lm", "transformers", "textual", "rich", "tui"}


def test_the_console_paints_before_it_loads_the_engine() -> None:
    assert not imported_by("import tui.app") & {"pydantic", "asyncssh", "tinydb", "httpx", "huggingface_hub", "mlx"}


def test_the_keepers_wire_format_needs_the_standard_library_only() -> None:
    assert not imported_by("import engine.protocol.attempt") & {"mlx", "pydantic", "numpy"}


@pytest.mark.parametrize("package", ["node", "protocol"])
def test_what_runs_on_python_3_9_gives_zip_no_keyword(package: str) -> None:
    for path in (Path(__file__).parents[2] / "engine" / package).rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not [call for call in calls if ast.unparse(call.func) == "zip" and call.keywords], path
