"""Which environment is planned for what a node has, and which packages and wheels it gets."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.environments import NodeSurvey, choose_minor, parse_survey, plan_environment
from engine.cluster.transport.base import Completed
from engine.cluster.wheels import given_requirements, installed_here, wheel_platforms
from engine.config.load import load_config
from engine.config.models import EnvironmentConfig, NodeConfig
from engine.config.node_pythons import write_pythons
from engine.errors import ConfigError, InputError

NODE = NodeConfig(name="ana", ssh="ana@mac.local", python="python3", workdir="~")
MAC = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "python_version": "3.12"}
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "python_version": "3.12"}


def python(version: str, *, tag: str = "macosx-11.0-arm64", venv: bool = True) -> str:
    mac = "15.1" if tag.startswith("macosx") else ""
    markers = {**(MAC if mac else LINUX), "python_version": version.rpartition(".")[0], "python_full_version": version}
    report: dict[str, Any] = {"version": version, "tag": tag, "libc": "", "mac": mac, "venv": venv, "markers": markers}
    return json.dumps(report)


def seen(pythons: dict[str, str], *, uv: bool = False, system: str = "Darwin arm64") -> NodeSurvey:
    rows = [("system", system, ""), *([("uv", "/opt/uv", "")] if uv else [])]
    rows += [("python", path, answer) for path, answer in pythons.items()]
    lines = ["Welcome to this Mac.", *("\t".join(("flightdeck-environment", *row)) for row in [*rows, ("end", "", "")])]
    return parse_survey(Completed(0, "\n".join(lines).encode(), b""))


def test_pythons_are_read_from_among_what_a_shell_prints_and_broken_ones_left_out() -> None:
    answers = {"/a/python3": python("3.12.4"), "b/python": python("3.12.4"), "/c": "{", "/d": python("3.x; rm -r")}
    survey_result = seen(answers, uv=True)
    assert [(base.path, base.minor) for base in survey_result.pythons] == [("/a/python3", "3.12")]
    assert (survey_result.uv, survey_result.problem) == ("/opt/uv", "")
    cut = parse_survey(Completed(255, b"flightdeck-environment\tuv\t/opt/uv\t\n", b"lost"))
    assert cut.problem == "its pythons are not known: lost", "not: it has none"


def test_the_python_is_one_that_all_nodes_can_have() -> None:
    both = seen({"/a": python("3.12.4"), "/b": python("3.13.1")})
    old = seen({"/a": python("3.12.1"), "/b": python("3.10.1")})
    assert choose_minor([both, old, seen({}, uv=True)], None) == "3.12"
    assert choose_minor([both], None) == "3.13", "the newest"
    assert choose_minor([both], "3.11") == "3.11"


@pytest.mark.parametrize(
    ("has", "uv", "problem"),
    [
        (
            {"/usr/bin/python3": python("3.9.6")},
            False,
            "is 3.9.6 (/usr/bin/python3, which Xcode brings): MLX needs 3.10",
        ),
        ({"/usr/bin/python3": python("3.9.6")}, True, ""),
        ({"/a": python("3.12.4", tag="macosx-10.9-x86_64")}, False, "is 3.12.4 for Intel (/a): MLX needs"),
        ({"/a": python("3.12.4", venv=False)}, False, "/a has no ensurepip"),
        ({"/a": python("3.12.4", venv=False)}, True, ""),
        ({"/a": python("3.11.4")}, False, "it has no Python 3.12, but 3.11"),
        ({}, False, "no python was found there"),
    ],
)
def test_a_python_that_will_not_do_is_named_with_what_to_do(has: dict[str, str], uv: bool, problem: str) -> None:
    plan = plan_environment(NODE, seen(has, uv=uv), "3.12", lambda _: ["mlx==1"])
    assert problem in plan.problem and bool(plan.problem) == bool(problem)
    assert ("brew install python@3.12" in plan.todo) == bool(problem)
    assert plan.describe()


def test_the_same_environment_has_the_same_path_on_all_nodes_and_no_secret_is_shown() -> None:
    index = "--index-url https://ana:hunter22@index.local/simple"
    one, other, brought = (
        plan_environment(NODE, nodes, "3.12", lambda _: [index, "mlx==1"])
        for nodes in (seen({"/a": python("3.12.4")}), seen({"/b": python("3.12.9")}), seen({}, uv=True))
    )
    assert one.python == f"~/.flightdeck/environments/{one.id}/bin/python" == other.python == brought.python
    assert one.requirements[0] == index
    assert "hunter22" not in one.model_dump_json() + repr(one) + one.describe()
    assert plan_environment(NODE, seen({"/a": python("3.12.4")}), "3.12", lambda _: ["mlx==2"]).id != one.id


def test_this_machines_packages_are_named_with_their_versions_for_the_nodes_platform() -> None:
    mac, linux = installed_here(MAC), installed_here(LINUX)
    for pins in (mac, linux):
        assert {f"mlx=={version('mlx')}", f"mlx-lm=={version('mlx-lm')}", f"numpy=={version('numpy')}"} <= {*pins}
        assert all("==" in pin or pin.startswith("mlx") for pin in pins), pins
    assert [pin for pin in mac if pin.startswith("mlx-")] == [
        f"mlx-lm=={version('mlx-lm')}",
        f"mlx-metal=={version('mlx')}",
    ]
    assert any(pin.startswith("mlx-cpu==") for pin in linux)


def test_wheels_are_for_what_the_node_runs() -> None:
    assert wheel_platforms("macosx-11.0-arm64", "", "15.3.1") == ["macosx_15_0_arm64"]
    glibc = wheel_platforms("linux-x86_64", "2.28", "")
    assert (glibc[0], glibc[-2:]) == ("manylinux_2_28_x86_64", ["manylinux_2_17_x86_64", "manylinux2014_x86_64"])
    assert wheel_platforms("linux-aarch64", "", "")[0] == "musllinux_1_2_aarch64"


def test_requirements_come_from_a_list_or_a_file_and_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# ours\nmlx==0.32.1  # fixed\n\nnumpy>=2 ; python_version > '3.10' \\\n    --hash=sha256:ab\n")
    given = given_requirements(EnvironmentConfig(requirements="requirements.txt"), tmp_path)
    assert given == ["mlx==0.32.1", "numpy>=2 ; python_version > '3.10'      --hash=sha256:ab"]
    for line in ("-r other.txt", "-e .", "./folder", "tiny @ file:///tmp/tiny.whl", "mlx ==", "--find-links x"):
        file.write_text(f"{line}\n")
        with pytest.raises(InputError, match="is no requirement"):
            given_requirements(EnvironmentConfig(requirements="requirements.txt"), tmp_path)
    assert given_requirements(EnvironmentConfig(), tmp_path) is None


def test_a_refused_table_names_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "flightdeck.toml"
    path.write_text(
        '[[node]]\n[job]\ncommand = ["true"]\n[environment]\nrequirements = ["-r x"]\npython = "3.9"\nuv = 1\n'
    )
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    keys = {fault.key for fault in refused.value.faults}
    assert keys == {"environment.requirements", "environment.python", "environment.uv"}


def test_pythons_are_written_where_they_are_and_all_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "flightdeck.toml"
    before = (
        '[[node]] # first\nname = "a"\npython = "x" # old\n\n[[node]]\nname = "b"\nssh = "bea"\npython = "~/y"\n'
        '[job]\ncommand = ["true"]\n'
    )
    path.write_text(before)
    path.chmod(0o640)
    write_pythons(load_config(path), {"bea": "~/new/python"})
    assert path.read_text() == before.replace('"~/y"', '"~/new/python"')
    write_pythons(load_config(path), {"127.0.0.1": "/new/python"})
    assert path.read_text().startswith('[[node]] # first\nname = "a"\npython = "/new/python" # old\n')
    assert path.stat().st_mode & 0o777 == 0o640
    path.write_text('node = [{name = "a"}]\n[job]\ncommand = ["true"]\n')
    with pytest.raises(InputError, match="unusual form"):
        write_pythons(load_config(path), {"127.0.0.1": "/new/python"})
