"""Which environment is planned for what a node has, and which packages and wheels it gets."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path

import pytest

from engine.cluster.environments import BasePython, NodePythons, choose_minor, parse_pythons, plan_environment
from engine.cluster.transport.base import Completed
from engine.cluster.wheels import fetch_wheels, given_requirements, installed_here, wheel_platforms, wheels_name
from engine.config.edit import write_pythons
from engine.config.load import load_config
from engine.config.models import Config, NodeConfig
from engine.errors import ConfigError, InputError
from tests.wheels import write_wheel

NODE = NodeConfig(name="ana", ssh="ana@mac.local", python="python3", workdir="~")


def python(version: str, machine: str = "arm64") -> str:
    return f"{version} darwin {machine} 15.1"


def seen(pythons: dict[str, str], *, uv: bool = False) -> NodePythons:
    rows = [*([("uv", "/opt/uv", "")] if uv else []), *(("python", *row) for row in pythons.items()), ("end", "", "")]
    lines = ["Welcome to this Mac.", *("\t".join(("flightdeck-environment", *row)) for row in rows)]
    return parse_pythons(Completed(0, "\n".join([*lines, ""]).encode(), b""))


def test_pythons_are_read_from_among_what_a_shell_prints_and_broken_ones_left_out() -> None:
    there = seen({"/a/python3": python("3.12.4"), "b/python": python("3.12.4"), "/d": python("3.x; rm")}, uv=True)
    assert [(base.path, base.minor, base.release) for base in there.pythons] == [("/a/python3", "3.12", "15.1")]
    assert (there.uv, there.problem) == ("/opt/uv", "")
    cut = parse_pythons(Completed(255, b"flightdeck-environment\tuv\t/opt/uv\t\n", b"lost"))
    assert cut.problem == "its pythons are not known: lost", "not: it has none"


def test_the_python_is_one_that_all_nodes_can_have() -> None:
    both = seen({"/a": python("3.12.4"), "/b": python("3.14.1")})
    old = seen({"/a": python("3.12.1"), "/b": python("3.10.1")})
    assert choose_minor([both, old, seen({}, uv=True)]) == "3.12"
    assert choose_minor([both]) == "3.14", "the newest"


@pytest.mark.parametrize(
    ("has", "uv", "problem"),
    [
        ({"/usr/bin/python3": python("3.9.6")}, False, "is 3.9 (/usr/bin/python3, of Xcode), and MLX needs 3.10"),
        ({"/usr/bin/python3": python("3.9.6")}, True, ""),
        ({"/a": python("3.12.4", "x86_64")}, False, "is 3.12 for Intel (/a), and MLX needs 3.10 or newer, for Apple"),
        ({"/a": python("3.11.4")}, False, "it has no Python 3.12, but 3.11: install uv"),
        ({}, False, "no python was found there: install uv"),
        ({}, True, "no python was found there: `uv python install 3.12`"),
    ],
)
def test_a_python_that_will_not_do_is_named_with_what_to_do(has: dict[str, str], uv: bool, problem: str) -> None:
    plan = plan_environment(NODE, seen(has, uv=uv), "3.12", lambda _: ["mlx==1"])
    assert problem in plan.problem and bool(plan.problem) == bool(problem)
    assert ("install Python 3.12 (python.org, brew)" in plan.describe()) == bool(problem)


def test_the_same_environment_has_the_same_path_on_all_nodes_and_no_secret_is_shown() -> None:
    index = "--index-url https://ana:hunter22@index.local/simple"
    has = [seen({"/a": python("3.12.4")}), seen({"/b": python("3.12.9")}), seen({"/c": python("3.9.6")}, uv=True)]
    one, other, brought = (plan_environment(NODE, there, "3.12", lambda _: [index, "mlx==1"]) for there in has)
    assert one.python == f"~/.flightdeck/environments/{one.id}/bin/python" == other.python == brought.python
    assert one.requirements[0] == index
    assert "hunter22" not in one.model_dump_json() + repr(one) + one.describe()
    assert plan_environment(NODE, has[0], "3.12", lambda _: ["mlx==2"]).id != one.id


def test_this_machines_packages_are_named_with_their_versions_for_the_nodes_platform() -> None:
    systems = (("darwin", "arm64"), ("linux", "x86_64"))
    pythons = (BasePython(path="/a", minor="3.12", system=one, machine=kind, release="15") for one, kind in systems)
    mac, linux = (installed_here(base.markers) for base in pythons)
    for pins in (mac, linux):
        assert {f"mlx=={version('mlx')}", f"mlx-lm=={version('mlx-lm')}", f"numpy=={version('numpy')}"} <= {*pins}
        assert all("==" in pin or pin.startswith("mlx") for pin in pins), pins
    assert [pin for pin in mac if pin.startswith("mlx-")] == [
        f"mlx-lm=={version('mlx-lm')}",
        f"mlx-metal=={version('mlx')}",
    ]
    assert any(pin.startswith("mlx-cpu==") for pin in linux)


def test_wheels_are_for_what_the_node_runs() -> None:
    def base(system: str, machine: str, release: str) -> BasePython:
        return BasePython(path="/a", minor="3.12", system=system, machine=machine, release=release)

    assert wheel_platforms(base("darwin", "arm64", "15.3.1")) == ["macosx_15_0_arm64"]
    glibc = wheel_platforms(base("linux", "x86_64", "2.28"))
    assert (glibc[0], glibc[-2:]) == ("manylinux_2_28_x86_64", ["manylinux_2_17_x86_64", "manylinux2014_x86_64"])


def config(folder: Path, environment: str) -> Config:
    path = folder / "flightdeck.toml"
    path.write_text(f'[[node]]\n[job]\ncommand = ["true"]\n[environment]\n{environment}\n')
    return load_config(path)


def test_requirements_come_from_a_list_or_a_file_and_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# ours\nmlx==0.32.1  # fixed\n\nnumpy>=2 ; python_version > '3.10' \\\n    --hash=sha256:ab\n")
    of_file = config(tmp_path, 'requirements = "requirements.txt"')
    assert given_requirements(of_file) == ["mlx==0.32.1", "numpy>=2 ; python_version > '3.10'      --hash=sha256:ab"]
    for line in ("-r other.txt", "-e .", "./folder", "folder/a.whl", "tiny @ file:///tmp/tiny.whl", "--find-links x"):
        file.write_text(f"{line}\n")
        with pytest.raises(InputError, match="line 1 is none of these"):
            given_requirements(of_file)
        with pytest.raises(ConfigError, match="line 1 is none of these"):
            config(tmp_path, f'requirements = ["{line}"]')
    assert given_requirements(config(tmp_path, "")) is None
    assert given_requirements(config(tmp_path, 'requirements = ["mlx[cpu]", "tiny @ https://a.b/tiny.whl"]'))


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


def test_a_password_is_refused_in_the_list_and_taken_from_a_file(tmp_path: Path) -> None:
    lines = ["--index-url https://ana:hunter22@index.local/simple", "tiny @ https://hunter22@index.local/tiny.whl"]
    for line in lines:
        with pytest.raises(
            ConfigError, match="a requirements file's path, as a line has a user or password"
        ) as refused:
            config(tmp_path, f'requirements = ["{line}"]')
        assert "hunter22" not in str(refused.value)
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    of_file = config(tmp_path, 'requirements = "requirements.txt"')
    assert given_requirements(of_file) == lines and "hunter22" not in of_file.model_dump_json()
    public = "--index-url https://index.local/simple"
    assert config(tmp_path, f'requirements = ["{public}"]').environment.requirements == (public,)


async def test_two_that_need_the_same_wheels_at_once_get_them_from_one_folder(tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "tiny", "1.0")
    ours = config(tmp_path, 'requirements = ["tiny==1.0"]\nwheels = "wheels"')
    rows = (f"3.12.{patch} darwin arm64 15.{patch}" for patch in (5, 6))
    plans = [plan_environment(NODE, seen({"/a": row}), "3.12", lambda _: ["tiny==1.0"]) for row in rows]
    assert len({wheels_name(plan) for plan in plans}) == 1
    folders = await asyncio.gather(*(fetch_wheels(ours, plan, tmp_path / "cache", print) for plan in plans))
    assert folders[0] == folders[1]
    sent = (folders[0] / "tiny-1.0-py3-none-any.whl").stat().st_ino
    assert await fetch_wheels(ours, plans[0], tmp_path / "cache", print) == folders[0]
    assert (folders[0] / "tiny-1.0-py3-none-any.whl").stat().st_ino == sent, "what another may be sending stays"
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {"", ".lock"}
    write_wheel(tmp_path / "wheels", "tiny", "1.0", content={"tiny.py": "another = 1"})
    cache, during = tmp_path / "cache", list[Path]()
    await fetch_wheels(ours, plans[0], cache, lambda _: during.extend(cache.iterdir()))
    assert during and ".txt" not in {path.suffix for path in during}, "pip's list may hold a password"
    assert (folders[0] / "tiny-1.0-py3-none-any.whl").read_bytes() == (
        tmp_path / "wheels" / "tiny-1.0-py3-none-any.whl"
    ).read_bytes()
