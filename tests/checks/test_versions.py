"""versions_match asks the real interpreters; a wrapper with another package on its path stands for another node."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from engine.checks import versions as check
from engine.checks.interpreter import Interpreter
from engine.checks.versions import evaluate
from engine.models import CheckStatus
from tests.checks.conftest import make_config, run_check

pytestmark = pytest.mark.usefixtures("shared_agent")


def interpreter_with(directory: Path, package: str, source: str) -> str:
    """A python in which `package` is `source`, as a node with another installation has."""
    shadow = directory / "shadow"
    (shadow / package).mkdir(parents=True)
    (shadow / package / "__init__.py").write_text(source)
    wrapper = directory / "bin" / "python"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(shadow))} exec {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


async def test_the_interpreter_that_runs_the_tests_is_fit(model: Path, data: Path, tmp_path: Path) -> None:
    result = await run_check(check.run, make_config(model, data, tmp_path))
    assert result.status is CheckStatus.PASS, result.summary
    assert "mlx 0." in result.evidence["node1"]


async def test_another_mlx_lm_on_one_node_is_named_and_comes_with_an_install_command(
    model: Path, data: Path, tmp_path: Path
) -> None:
    other = interpreter_with(tmp_path / "other", "mlx_lm", "__version__ = '0.99.0'\n")
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=(sys.executable, other)))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert "mlx-lm 0.99.0, rank 0 has" in result.summary
    assert (result.fix_command or "").startswith(f"uv pip install --python {other} mlx-lm==")


async def test_a_package_that_cannot_be_imported_says_why(model: Path, data: Path, tmp_path: Path) -> None:
    broken = interpreter_with(tmp_path / "broken", "mlx_lm", "raise ImportError('no libmlx.so')\n")
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=(broken,)))
    assert "mlx-lm cannot be imported: ImportError: no libmlx.so" in result.summary


async def test_a_job_that_may_not_need_mlx_lm_has_it_found_and_not_imported(
    model: Path, data: Path, tmp_path: Path
) -> None:
    broken = interpreter_with(tmp_path / "broken", "mlx_lm", "raise ImportError('no libmlx.so')\n")
    config = make_config(model, data, tmp_path, pythons=(broken,))
    job = config.job.model_copy(update={"command": ("python", "mine.py")})
    result = await run_check(check.run, config.model_copy(update={"job": job}))
    assert (result.status, "mlx-lm 0." in result.evidence["node0"]) == (CheckStatus.PASS, True), result


async def test_a_missing_interpreter_is_made_by_its_fix(model: Path, data: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "venv" / "bin" / "python")
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=(sys.executable, missing)))
    assert f"no such interpreter: {missing}" in result.summary
    assert (result.fix_command or "").startswith(f"uv venv {tmp_path / 'venv'} && uv pip install --python {missing} ")


async def test_a_program_that_is_no_python_is_not_believed(model: Path, data: Path, tmp_path: Path) -> None:
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=("/bin/echo",)))
    assert result.status is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("mlx", "accepted"),
    [("0.32.0", False), ("0.31.9", False), ("0.32.1", True), ("0.32.1.dev20260101+abc", True), ("1.0", True)],
)
def test_mlx_must_be_new_enough(model: Path, data: Path, tmp_path: Path, mlx: str, accepted: bool) -> None:
    seen = Interpreter("3.11.9", mlx, "0.32.2", backends=("ring",))
    result = evaluate(make_config(model, data, tmp_path), {"node0": seen, "node1": seen})
    assert (result.status is CheckStatus.PASS) is accepted
    if not accepted:
        assert ">=0.32.1" in (result.fix_command or "")


def test_a_build_without_the_ring_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    seen = Interpreter("3.11.9", "0.32.4", "0.32.2", backends=())
    result = evaluate(make_config(model, data, tmp_path), {"node0": seen, "node1": seen})
    assert "no ring backend" in result.summary


def test_another_python_is_a_difference_too(model: Path, data: Path, tmp_path: Path) -> None:
    first = Interpreter("3.11.9", "0.32.4", "0.32.2", backends=("ring",))
    second = Interpreter("3.12.1", "0.32.4", "0.32.2", backends=("ring",))
    result = evaluate(make_config(model, data, tmp_path), {"node0": first, "node1": second})
    assert result.blames == (1, "node1")
    assert "python 3.12.1, rank 0 has 3.11.9" in result.summary
