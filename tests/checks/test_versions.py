"""versions_match asks the real interpreters; a wrapper with another package on its path stands for another node."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.checks import versions as check
from engine.checks.fixes import as_shell_line
from engine.checks.interpreter import Interpreter, as_interpreter, environment_of, with_modules
from engine.checks.versions import evaluate
from engine.cluster.probe_results import PackagesReport
from engine.failures.explanation import findings
from engine.failures.signatures import BY_ID
from engine.models import CheckResult, CheckStatus, Failed, Late, Unparsable
from engine.protocol.task import Task
from tests.checks.conftest import make_config, run_check

pytestmark = pytest.mark.usefixtures("shared_agent")

MLX_LM = {"mlx_lm": "mlx-lm"}
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


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


@pytest.mark.parametrize(
    ("error", "signature"),
    [
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "cuda.no_driver"),
        ("ModuleNotFoundError: No module named 'sentencepiece'", "import.other"),
        ("OSError: [Errno 28] No space left on device", "disk.full"),
    ],
)
def test_an_import_error_is_explained_as_in_a_run(error: str, signature: str) -> None:
    (known,) = findings([error])
    assert known.signature is BY_ID[signature]
    explained = f"{error} ({known.cause}); {known.fix}"
    errors = dict.fromkeys(("mlx", "mlx_lm", "torch"), error)
    report = PackagesReport(python="3.12.1", linux=True, venv=True, versions={}, errors=errors, backends=[])
    for name in ("mlx", "torch"):
        seen = as_interpreter(report, [name], "python")
        assert seen.problem == f"{name} cannot be imported: {explained}"
    assert explained in (with_modules(seen, report, MLX_LM).problem or "")


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
    make = f"mkdir -p {tmp_path} && mkdir {tmp_path / 'venv'} && sh -c 'uv venv --python {MINOR} {tmp_path / 'venv'}"
    assert (result.fix_command or "").startswith(f"{make} && uv pip install --python {missing} ")


async def test_a_missing_interpreter_of_a_file_is_made_by_flight_deck_which_writes_it_there(
    model: Path, data: Path, tmp_path: Path
) -> None:
    missing = str(tmp_path / "venv" / "bin" / "python")
    config = make_config(model, data, tmp_path, pythons=(sys.executable, missing))
    file = tmp_path / "my flightdeck.toml"
    result = await run_check(check.run, config.model_copy(update={"file": file}))
    assert result.fix_command == f"flightdeck environments make --node node1 --yes -c '{file}'"
    assert result.fix_command == as_shell_line(config, result.fixes)


async def test_a_machine_with_nvidias_driver_gets_the_cuda_build_also_where_no_interpreter_could_be_asked(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreters_called(tmp_path, monkeypatch)
    shutil.copy(tmp_path / "programs" / "uv", tmp_path / "programs" / "nvidia-smi")
    missing = str(tmp_path / "venv" / "bin" / "python")
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=(missing,)))
    assert "mlx[cuda13]>=" in (result.fix_command or ""), result


async def test_a_missing_interpreter_outside_of_bin_is_made_in_a_folder_of_its_own(
    model: Path, data: Path, tmp_path: Path
) -> None:
    missing = str(tmp_path / "env" / "python")
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=(sys.executable, missing)))
    made = tmp_path / "env" / ".venv"
    assert f"mkdir {made} && sh -c 'uv venv --python {MINOR} {made} && uv pip install --python {made}/bin/python " in (
        result.fix_command or ""
    )
    assert f'set python = "{made}/bin/python" in its [[node]]' in result.summary


@pytest.mark.parametrize("broken", ["gone", "not executable", "ends at once"])
async def test_an_environment_whose_python_is_broken_gets_another_one_beside_it(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Say, one whose interpreter Homebrew has removed; or the one that Flight Deck runs from."""
    environment = tmp_path / "a venv"
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    (environment / "mine").write_text("mine")
    if broken != "gone":
        python.write_text("#!/bin/sh\necho dyld: Library not loaded >&2\nexit 134\n")
        python.chmod(0o755 if broken == "ends at once" else 0o644)
    called = interpreters_called(tmp_path, monkeypatch)
    before = sorted(path.name for path in environment.rglob("*"))
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=(sys.executable, str(python))))
    beside = f"{environment}-{MINOR}"
    assert f'set python = "{beside}/bin/python" in its [[node]]' in result.summary
    assert result.effects == {"node1": f"makes {beside}, and changes nothing else; rm -r removes it"}
    assert (pasted(result).returncode, Path(beside).is_dir()) == (0, True)
    assert called().startswith(f"venv --python {MINOR} {beside}\npip install --python {beside}/bin/python ")
    assert sorted(path.name for path in environment.rglob("*")) == before
    # It is there now: a second time nothing is written into it.
    assert "File exists" in pasted(result).stderr and Path(beside).is_dir()


async def test_an_environment_that_could_not_be_made_is_removed_so_that_its_fix_can_be_run_again(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "a venv"
    called = interpreters_called(tmp_path, monkeypatch, fails="pip")
    config = make_config(model, data, tmp_path, pythons=(sys.executable, f"{made}/bin/python"))
    result = await run_check(check.run, config)
    for count in (1, 2):
        assert (pasted(result).returncode != 0, made.exists()) == (True, False)
        assert called().count("venv --python") == count


def pasted(result: CheckResult) -> subprocess.CompletedProcess[str]:
    return subprocess.run(result.fix_command or "false", shell=True, check=False, capture_output=True, text=True)


def interpreters_called(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails: str = "") -> Callable[[], str]:
    """A `uv` that only notes how it was called, and fails at its command `fails`."""
    log, uv = folder / "called", folder / "programs" / "uv"
    log.write_text("")
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\necho "$@" >>{log}\n[ "$1" != "{fails}" ]\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    return log.read_text


async def test_a_program_that_is_no_python_is_not_believed(model: Path, data: Path, tmp_path: Path) -> None:
    result = await run_check(check.run, make_config(model, data, tmp_path, pythons=("/bin/echo",)))
    assert result.status is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("mlx", "accepted"),
    [("0.32.0", False), ("0.31.9", False), ("0.32.1", True), ("0.32.1.dev20260101+abc", True), ("1.0", True)],
)
def test_mlx_must_be_new_enough(model: Path, data: Path, tmp_path: Path, mlx: str, accepted: bool) -> None:
    seen = Interpreter("3.11.9", {"mlx": mlx, "mlx-lm": "0.32.2"}, backends=("ring",))
    result = evaluate(make_config(model, data, tmp_path), {"node0": seen, "node1": seen})
    assert (result.status is CheckStatus.PASS) is accepted
    if not accepted:
        assert ">=0.32.1" in (result.fix_command or "")


def test_a_build_without_the_ring_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    seen = Interpreter("3.11.9", {"mlx": "0.32.4", "mlx-lm": "0.32.2"}, backends=())
    result = evaluate(make_config(model, data, tmp_path), {"node0": seen, "node1": seen})
    assert "no ring backend" in result.summary


@pytest.mark.parametrize(
    "answer",
    [
        Late(command="the mlx_lm probe", after_s=60),
        Failed(command="the mlx_lm probe", exit_code=-9),
        Unparsable(command="the mlx_lm probe", output="hello"),
    ],
)
def test_an_answer_about_mlx_lm_that_did_not_come_is_no_missing_package(
    model: Path, data: Path, tmp_path: Path, answer: Late | Failed | Unparsable
) -> None:
    seen = with_modules(replace(FIRST, packages={"mlx": "0.32.4"}), answer, MLX_LM)
    result = evaluate(make_config(model, data, tmp_path), {"node0": FIRST, "node1": seen})
    assert (result.status, result.blames, result.fix_command) == (CheckStatus.FAIL, (1, "node1"), None)
    assert f"it is not known whether mlx-lm can be imported: {answer}" in result.summary


def test_lm_eval_is_needed_by_its_own_tasks_alone(model: Path, data: Path, tmp_path: Path) -> None:
    config = make_config(model, data, tmp_path)
    job = config.job.model_copy(update={"task": Task("lm_eval", "run")})
    modules = {"mlx_lm": "mlx-lm", "lm_eval": "lm_eval"}
    assert config.job.kind.packages(()) == ("mlx", "mlx-lm") and job.kind.packages(()) == ("mlx", *modules.values())
    report = PackagesReport(
        python="3.11.9",
        linux=False,
        venv=True,
        versions={"mlx_lm": "0.32.2"},
        errors={"lm_eval": "No module named it"},
        backends=[],
    )
    seen = with_modules(replace(FIRST, packages={"mlx": "0.32.4"}), report, modules)
    result = evaluate(config.model_copy(update={"job": job}), {"node0": seen, "node1": seen})
    assert result.status is CheckStatus.FAIL and "lm_eval cannot be imported: No module named it" in result.summary
    assert "'lm_eval>=0.4.9'" in (result.fix_command or "") and "mlx-lm>=" not in (result.fix_command or "")
    fit = replace(seen, packages={**seen.packages, "lm_eval": "0.4.13"}, problem=None)
    assert evaluate(config.model_copy(update={"job": job}), {"node0": fit, "node1": fit}).status is CheckStatus.PASS


def test_a_missing_package_is_installed_whatever_is_not_known_of_another(
    model: Path, data: Path, tmp_path: Path
) -> None:
    answer = Late(command="the mlx_lm probe", after_s=60)
    late = with_modules(replace(FIRST, packages={}, problem="no mlx"), answer, MLX_LM)
    result = evaluate(make_config(model, data, tmp_path), {"node0": FIRST, "node1": late})
    assert "mlx==0.32.4" in (result.fix_command or "") and "mlx-lm" not in (result.fix_command or "")


FIRST = Interpreter("3.11.9", {"mlx": "0.32.4", "mlx-lm": "0.32.2"}, backends=("ring",), venv=True, linux=False)


def test_another_python_is_a_difference_too_and_its_fix_makes_an_environment_beside_the_nodes_own(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / ".venv"
    (own / "bin").mkdir(parents=True)
    called = interpreters_called(tmp_path, monkeypatch)
    config = make_config(model, data, tmp_path, pythons=(sys.executable, f"{own}/bin/python"))
    result = evaluate(config, {"node0": FIRST, "node1": replace(FIRST, python="3.12.1")})
    assert result.blames == (1, "node1")
    assert "python 3.12.1, rank 0 has 3.11.9" in result.summary
    assert f'then set python = "{own}-3.11/bin/python" in its [[node]]' in result.summary
    assert "--clear" not in (result.fix_command or "")
    assert pasted(result).returncode == 0
    install = f"pip install --python {own}-3.11/bin/python mlx==0.32.4 mlx-lm==0.32.2"
    assert called() == f"venv --python 3.11 {own}-3.11\n{install}\n"


def test_nothing_is_installed_into_the_environment_that_flight_deck_runs_from(
    model: Path, data: Path, tmp_path: Path
) -> None:
    config = make_config(model, data, tmp_path)
    result = evaluate(config, {"node0": FIRST, "node1": replace(FIRST, packages={"mlx": "0.31.0", "mlx-lm": "0.32.2"})})
    assert f"uv venv --python 3.11 {sys.prefix}-3.11 && " in (result.fix_command or "")
    install = f"uv pip install --python {sys.prefix}-3.11/bin/python mlx==0.32.4 mlx-lm==0.32.2"
    assert install in (result.fix_command or "") and f"{sys.prefix}/" not in (result.fix_command or "")


def test_a_system_python_gets_an_environment_in_the_home(model: Path, data: Path, tmp_path: Path) -> None:
    config = make_config(model, data, tmp_path, pythons=(sys.executable, "/usr/bin/python3"))
    result = evaluate(config, {"node0": FIRST, "node1": replace(FIRST, python="3.9.6", venv=False)})
    assert 'uv venv --python 3.11 "$HOME"/.venv-3.11 && ' in (result.fix_command or "")


@pytest.mark.parametrize("seen", [FIRST, Interpreter(absent=True, beside=environment_of("~/bin/python"))])
@pytest.mark.parametrize("python", ["~/bin/python", "/bin/python"])
def test_a_home_is_no_environment_to_make_another_beside(
    model: Path, data: Path, tmp_path: Path, seen: Interpreter, python: str
) -> None:
    config = make_config(model, data, tmp_path, pythons=(sys.executable, python))
    other = replace(seen, python=seen.python and "3.12.1")
    result = evaluate(config, {"node0": FIRST, "node1": other})
    assert 'mkdir "$HOME"/.venv-3.11 && ' in (result.fix_command or "")


@pytest.mark.parametrize(
    ("seen", "back"),
    [
        (
            replace(FIRST, packages={"mlx": "0.31.0", "mlx-lm": "0.32.2"}),
            "uv pip install --python '/a b/python' mlx==0.31.0",
        ),
        (replace(FIRST, packages={"mlx-lm": "0.32.2"}), "uv pip uninstall --python '/a b/python' mlx"),
    ],
)
def test_the_way_back_of_an_installation_is_that_of_the_same_environment(seen: Interpreter, back: str) -> None:
    both = {"mlx": "==0.32.4", "mlx-lm": "==0.32.2"}
    mlx = check.install_fix("/a b/python", seen, {"mlx": both["mlx"]})
    assert f"`{back}` takes back all but dependencies" in mlx.effect
    without = check.install_fix(
        "/a b/python",
        replace(seen, packages={name: each for name, each in seen.packages.items() if name == "mlx"}),
        both,
    )
    lm = " mlx-lm" if "mlx" not in seen.packages else " && uv pip uninstall --python '/a b/python' mlx-lm"
    assert f"`{back}{lm}` takes back" in without.effect


def test_another_patch_version_of_python_only_warns(model: Path, data: Path, tmp_path: Path) -> None:
    result = evaluate(make_config(model, data, tmp_path), {"node0": FIRST, "node1": replace(FIRST, python="3.11.4")})
    assert (result.status, result.fix_command) == (CheckStatus.WARN, None)
    assert "python 3.11.4, rank 0 has 3.11.9" in result.summary


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_text_of_a_node_enters_a_command(python: str, mlx: str) -> None:
    report = {"python": python, "versions": {"mlx": mlx}, "errors": {}, "backends": []}
    try:
        seen = PackagesReport.model_validate({"linux": False, "venv": True, **report})
    except ValidationError:
        return
    for version in (seen.python, seen.versions["mlx"]):
        assert re.fullmatch(r"[0-9][0-9A-Za-z.+!_-]*", version)


@pytest.mark.parametrize("version", ["3.11; rm -rf ~", "$(id)", "3.11\n", "", "x"])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    for report in ({"python": version}, {"versions": {"mlx": version}}):
        whole = {"python": "3.11.9", "linux": False, "venv": True, "versions": {}, "errors": {}, "backends": []}
        with pytest.raises(ValidationError):
            PackagesReport.model_validate({**whole, **report})
