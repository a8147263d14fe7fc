"""Python environments that Flight Deck makes on nodes, each in a folder of its own below the node root: what a node has
to make one with, what would be made, the making, with wheels from here where the node reaches no index, and the list of
what there is."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError

from engine.cluster.agent_client import AgentRequest, value_of
from engine.cluster.probe_results import ShortText, VersionText
from engine.cluster.transport.base import Completed, Transport
from engine.cluster.transport.fleet import Fleet
from engine.cluster.wheels import Wheel, WheelCache, WheelTarget, wheel_platforms
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError, plural
from engine.measurements import Count
from engine.models import FrozenModel
from engine.node.bootstrap import ROOT, node_root
from engine.node.probes.environment import ACK_BYTES, FOLDER
from engine.protocol.messages import RequestEnded
from engine.security.paths import path_fault
from engine.security.redact import redact
from engine.security.sanitise import count_or_none, json_object, json_or_none, plain

OLDEST = (3, 10)
"""The first with wheels of mlx."""
_LARGE = ("mlx", "mlx-lm", "torch", "vllm")
_LARGE_BYTES, _SMALL_BYTES = 1_500_000_000, 50_000_000
"""Room for an environment with one of them, and for any other."""
_UNPACKED = 4
"""Bytes on the disk for each of a wheel, and the wheel itself."""
_SURVEY_LIMIT_S = 60.0
_LIST_LIMIT_S = 60.0
_INSTALL_PYTHON_S = 1800.0
_SILENCE_S = 120.0
"""The node shows life every 10 s."""
_UNDER_WAY = 16
"""Blocks of ACK_BYTES that are sent ahead."""
_MARK = "flightdeck-environment"
_ASK = """
import importlib.util, json, os, platform, sys, sysconfig
print(json.dumps({
    "version": platform.python_version(), "tag": sysconfig.get_platform(), "libc": platform.libc_ver()[1],
    "mac": platform.mac_ver()[0], "venv": importlib.util.find_spec("ensurepip") is not None,
    "markers": {
        "os_name": os.name, "sys_platform": sys.platform, "platform_machine": platform.machine(),
        "platform_system": platform.system(), "implementation_name": sys.implementation.name,
        "platform_python_implementation": platform.python_implementation(),
        "python_version": "%d.%d" % sys.version_info[:2], "python_full_version": platform.python_version(),
    },
}))
"""
_UVS = ('"$(command -v uv)"', *(f'"$HOME"/{place}/bin/uv' for place in (".local", ".cargo")), "/opt/homebrew/bin/uv")
_PYTHONS = (
    "/opt/homebrew/bin/python3.*[0-9]", "/usr/local/bin/python3.*[0-9]", "/opt/homebrew/bin/python3",
    "/Library/Frameworks/Python.framework/Versions/3.*/bin/python3",
    '"$HOME"/.local/share/uv/python/cpython-3.*/bin/python3', '"$HOME"/.pyenv/versions/3.*/bin/python3',
    '"$HOME"/miniforge3/bin/python3', "/usr/bin/python3.*[0-9]", "/usr/bin/python3",
)  # fmt: skip
_SCRIPT = f"""
say() {{ printf '{_MARK}\\t%s\\t%s\\t%s\\n' "$1" "$2" "$3"; }}
ask=$1; shift
say system "$(uname -s) $(uname -m)"
for uv in {" ".join(_UVS)} /usr/local/bin/uv; do
  if [ -x "$uv" ] && "$uv" --version >/dev/null 2>&1; then say uv "$uv"; break; fi
done
for python in "$@" "$(command -v python3)" {" ".join(_PYTHONS)}; do
  [ -x "$python" ] && [ ! -d "$python" ] || continue
  case "$python" in
    # Apple's stub opens a window that offers the developer tools where they are missing.
    /usr/bin/python3) [ "$(uname -s)" != Darwin ] || xcode-select -p >/dev/null 2>&1 || continue ;;
  esac
  if answer=$("$python" -I -c "$ask" </dev/null 2>/dev/null); then say python "$python" "$answer"; fi
done
say end
"""


class BasePython(FrozenModel):
    """A python that environments can be made of."""

    path: str
    """Empty for one that uv has to bring first."""
    version: VersionText
    tag: Annotated[str, Field(pattern=r"^(linux|macosx)-[A-Za-z0-9._-]{1,60}$")]
    """sysconfig.get_platform(): "macosx-11.0-arm64"."""
    libc: Annotated[str, Field(pattern=r"^[0-9.]{0,20}$")] = ""
    """glibc's version; empty on a Mac, and with musl."""
    mac: Annotated[str, Field(pattern=r"^[0-9.]{0,20}$")] = ""
    venv: bool
    """It has ensurepip, without which `venv` installs no pip."""
    markers: Annotated[dict[ShortText, ShortText], Field(max_length=20)]

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def fits(self) -> bool:
        """There are wheels of mlx for it: not for an Intel python on a Mac."""
        return minor_numbers(self.minor) >= OLDEST and not (self.mac and "arm64" not in self.tag)


class NodeSurvey(FrozenModel):
    """A node's means to make an environment with."""

    uv: str | None = None
    system: str = ""
    machine: str = ""
    """As uname(1) has them."""
    pythons: tuple[BasePython, ...] = ()
    problem: str = ""
    """Why that is not known."""

    @property
    def usable(self) -> list[BasePython]:
        return [python for python in self.pythons if python.fits and (python.venv or self.uv)]

    def brought(self, minor: str) -> BasePython:
        """One that uv installs here."""
        mac = self.system == "Darwin"
        markers = {
            "os_name": "posix", "sys_platform": self.system.lower(), "platform_system": self.system,
            "platform_machine": self.machine, "implementation_name": "cpython", "python_version": minor,
            "platform_python_implementation": "CPython", "python_full_version": f"{minor}.0",
        }  # fmt: skip
        tag = f"macosx-11.0-{self.machine}" if mac else f"linux-{self.machine}"
        return BasePython(path="", version=minor, tag=tag, venv=True, markers=markers)


class MadeEnvironment(FrozenModel):
    """A finished environment on a node."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    requirements: Annotated[tuple[ShortText, ...], Field(max_length=1000)]
    made_at: Annotated[float, Field(ge=0, le=1e11)]
    bytes: Count
    packages: Annotated[dict[ShortText, ShortText], Field(max_length=2000)]


class EnvironmentsReport(FrozenModel):
    environments: Annotated[list[MadeEnvironment], Field(max_length=1000)]
    free_bytes: Count
    online: bool
    """The package index can be reached."""
    problem: ShortText | None = None
    """Why the one that was named is not removed."""


class EnvironmentPlan(FrozenModel):
    """The environment that would be made on one host."""

    node: str
    ssh: str
    id: str = ""
    python: str = ""
    """The environment's, as `python` of [[node]] has it."""
    base: BasePython | None = None
    uv: str | None = None
    requirements: tuple[str, ...] = Field(default=(), exclude=True, repr=False)
    """An index among them may have a password."""
    shown: tuple[str, ...] = ()
    """`requirements` without secrets."""
    online: bool = True
    """Packages come from the index; else as wheels from this machine."""
    made: bool = False
    """It is there already."""
    free_bytes: int | None = None
    problem: str = ""
    """Why none can be made."""
    todo: str = ""

    def wheel_target(self, python: BasePython) -> WheelTarget:
        platforms = wheel_platforms(python.tag, python.libc, python.mac)
        return WheelTarget(f"{self.id}-{platforms[0]}", platforms, python.minor, self.requirements)

    def describe(self) -> str:
        if self.problem or self.base is None:
            return f"{self.problem}: {self.todo}" if self.todo else self.problem
        if self.made:
            return f"{self.python} is there"
        python = f"Python {self.base.version}" if self.base.path else f"a Python {self.base.version} that uv brings"
        source = "from the package index" if self.online else "from wheels that this machine sends"
        tool = "uv" if self.uv else "venv and pip"
        return f"{self.python}: {plural(len(self.shown), 'requirement')}, {source}, by {tool} with {python}"


class EnvironmentProgress(FrozenModel):
    node: str
    text: str
    ended: bool = False
    failed: bool = False


async def inspect_node(transport: Transport) -> NodeSurvey:
    """Never raises for a node that cannot answer: `problem` then says why."""
    first = [f"{sys.base_prefix}/bin/python{sys.version_info[0]}"] if transport.target.local else []
    try:
        done = await transport.run(["/bin/sh", "-c", _SCRIPT, "sh", _ASK, *first], timeout_s=_SURVEY_LIMIT_S)
    except (FlightDeckError, OSError) as error:
        return NodeSurvey(problem=plain(error, 300))
    return parse_survey(done)


def parse_survey(done: Completed) -> NodeSurvey:
    """From the script's output, with whatever a shell's start files printed around it."""
    report, pythons = dict[str, str](), dict[str, BasePython]()
    for line in done.stdout.decode(errors="replace").split("\n"):
        mark, kind, value, answer = (*line.split("\t", 3), "", "", "")[:4]
        if mark != _MARK:
            continue
        if kind == "python" and path_fault(value) is None and value.startswith("/"):
            with contextlib.suppress(ValidationError):
                python = BasePython.model_validate({**json_object(json_or_none(answer)), "path": value})
                pythons.setdefault(value, python)
        elif kind != "uv" or (path_fault(value) is None and value.startswith("/")):
            report.setdefault(kind, value)
    if "end" not in report:
        why = plain(done.exit_output, 200) if done.code is not None else f"no answer within {_SURVEY_LIMIT_S:g} s"
        return NodeSurvey(problem=f"its pythons are not known: {why}")
    system, _, machine = report.get("system", "").partition(" ")
    return NodeSurvey(uv=report.get("uv"), system=system, machine=machine, pythons=tuple(pythons.values()))


def minor_numbers(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split(".") if part.isdigit())


def choose_minor(surveys: Iterable[NodeSurvey], wanted: str | None) -> str:
    """The Python of all environments, such as "3.12": the wanted one, else this machine's where every node can have it,
    else the newest that every node has."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # uv brings any.
    bound = [node for node in surveys if not node.uv and not node.problem]
    common = set[str].intersection(*({python.minor for python in node.usable} for node in bound)) if bound else {here}
    return wanted or (here if here in common or not common else max(common, key=minor_numbers))


def plan_environment(
    node: NodeConfig, seen: NodeSurvey, minor: str, requirements: Callable[[Mapping[str, str]], Sequence[str]]
) -> EnvironmentPlan:
    """`requirements`: of a python with these markers. What the node has by now is not looked at."""
    plan = EnvironmentPlan(node=node.name, ssh=node.ssh, uv=seen.uv, problem=seen.problem)
    base = next((python for python in seen.usable if python.minor == minor), None) or (
        seen.brought(minor) if seen.uv else None
    )
    if base is None or seen.problem:
        return (
            plan
            if seen.problem
            else plan.model_copy(update=dict(zip(("problem", "todo"), _unfit(seen, minor), strict=True)))
        )
    wanted = tuple(requirements(base.markers))
    shown = tuple(map(redact, wanted))
    platform = (base.markers.get("sys_platform"), base.markers.get("platform_machine"))
    name = hashlib.sha256(json.dumps([sorted(shown), base.minor, *platform]).encode()).hexdigest()[:16]
    root = node_root() if node.local else f"~/{ROOT}"
    update = {"id": name, "python": f"{root}/{FOLDER}/{name}/bin/python", "base": base, "requirements": wanted}
    return plan.model_copy(update={**update, "shown": shown})


def _unfit(seen: NodeSurvey, minor: str) -> tuple[str, str]:
    """Why no environment can be made, and what to do."""
    bring = f"install uv (https://docs.astral.sh/uv), or Python {minor} (python.org, or `brew install python@{minor}`)"
    if seen.system == "Linux":
        bring = f"install uv (https://docs.astral.sh/uv), or Python {minor} with its venv module (python{minor}-venv)"
    fitting = [python for python in seen.pythons if python.fits]
    if lacking := next((python for python in fitting if python.minor == minor and not python.venv), None):
        return f"{lacking.path} has no ensurepip, so that it makes no environment", bring
    if fitting:
        return f"it has no Python {minor}, but {', '.join(dict.fromkeys(python.minor for python in fitting))}", bring
    newest = max(seen.pythons, key=lambda python: minor_numbers(python.version), default=None)
    if newest is None:
        return "no python was found there", bring
    whose = ", which Xcode brings" if seen.system == "Darwin" and newest.path == "/usr/bin/python3" else ""
    intel = " for Intel" if newest.mac and "arm64" not in newest.tag else ""
    needs = f"MLX needs {'.'.join(map(str, OLDEST))} or newer{', for Apple silicon' if intel else ''}"
    return f"its newest Python is {newest.version}{intel} ({newest.path}{whose}): {needs}", bring


def _agent_node(plan: EnvironmentPlan, python: str) -> NodeConfig:
    return NodeConfig(name=plan.node, ssh=plan.ssh, python=python, workdir="~")


async def list_environments(fleet: Fleet, node: NodeConfig, *, remove: str = "") -> EnvironmentsReport:
    """By the node's `python`. Raises LaunchError, NodeUnreachable."""
    agent = fleet.agent(node)
    root = await _root(fleet, node)
    report = await agent.probe("environments", root, remove, result_type=EnvironmentsReport, timeout_s=_LIST_LIMIT_S)
    return value_of(report, node)


async def _root(fleet: Fleet, node: NodeConfig) -> str:
    return str(node_root()) if node.local else f"{(await fleet.agent(node).session()).home.home}/{ROOT}"


async def compare_with_node(fleet: Fleet, plan: EnvironmentPlan, seen: NodeSurvey, *, offline: bool) -> EnvironmentPlan:
    """The plan with what the node has by now."""
    python = next((python.path for python in (plan.base, *seen.pythons) if python is not None and python.path), "")
    if plan.problem or not python:
        return plan
    try:
        report = await list_environments(fleet, _agent_node(plan, python))
    except (FlightDeckError, OSError) as error:
        return plan.model_copy(update={"problem": plain(error, 300)})
    made = any(environment.id == plan.id for environment in report.environments)
    update: dict[str, object] = {"made": made, "online": report.online and not offline, "free_bytes": report.free_bytes}
    large = update["online"] and any(re.split(r"[^\w-]", line)[0] in _LARGE for line in plan.requirements)
    if not made and (room := _LARGE_BYTES if large else _SMALL_BYTES) > report.free_bytes:
        update["problem"] = f"{report.free_bytes / 1e9:.1f} GB are free there, and {room / 1e9:.1f} GB are needed"
        update["todo"] = "make room there"
    return plan.model_copy(update=update)


async def make_environment(
    fleet: Fleet, plan: EnvironmentPlan, cache: WheelCache, report: Callable[[str], None]
) -> MadeEnvironment:
    """With wheels of `cache` where the node reaches no index. Raises LaunchError with the reason why not,
    NodeUnreachable, OSError; what has been sent by then is not sent again."""
    assert plan.base is not None
    python = plan.base.path or await _bring_python(fleet, plan, report)
    sent = None if plan.online else await cache.get(plan.wheel_target(plan.base), report)
    size = sum(wheel.bytes for wheel in sent or ())
    if sent and plan.free_bytes is not None and (room := _UNPACKED * size + _SMALL_BYTES) > plan.free_bytes:
        why = f"{plan.free_bytes / 1e6:,.0f} MB are free, and {room / 1e6:,.0f} MB are needed"
        raise LaunchError("there is no room for the environment", where=plan.node, why=why, todo="make room there")
    order: dict[str, object] = {
        "id": plan.id,
        "python": python,
        "uv": plan.uv,
        "requirements": plan.requirements,
        "shown": plan.shown,
    }
    if sent is not None:
        order["wheels"] = [{"name": wheel.name, "bytes": wheel.bytes, "sha256": wheel.sha256} for wheel in sent]
        order["requirements"] = [line for line in plan.requirements if not line.startswith("-")]
    node = _agent_node(plan, python)
    with contextlib.closing(await fleet.agent(node).start_probe("environment", await _root(fleet, node))) as request:
        request.send(json.dumps({"wheels": None, **order}).encode() + b"\n")
        while True:
            message = await _message(request, node)
            if "lacks" in message:
                lacking = [wheel for wheel in sent or () if wheel.name in message["lacks"]]
                await _send(request, node, lacking, report)
            elif "made" in message:
                return MadeEnvironment.model_validate(message["made"])
            elif "problem" in message:
                raise LaunchError("the environment is not made", where=plan.node, why=_shown(message["problem"]))
            elif text := _shown(message.get("text", "")):
                report(text)


async def _bring_python(fleet: Fleet, plan: EnvironmentPlan, report: Callable[[str], None]) -> str:
    """Let uv install one; its path. Raises LaunchError, NodeUnreachable."""
    assert plan.base is not None and plan.uv is not None
    report(f"uv installs Python {plan.base.version}")
    for words in ("install", "find"):
        argv = [plan.uv, "python", words, plan.base.version]
        done = await fleet.reach(plan.ssh).run(argv, timeout_s=_INSTALL_PYTHON_S)
        if done.code != 0:
            what = f"uv could not {words} Python {plan.base.version}"
            raise LaunchError(what, where=plan.node, why=_shown(done.exit_output) or "its time is over")
    path = done.stdout.decode(errors="replace").strip()
    if path_fault(path) is not None or not path.startswith("/"):
        raise LaunchError("uv names no python", where=plan.node, why=plain(path, 80))
    return path


async def _message(request: AgentRequest, node: NodeConfig) -> dict[str, Any]:
    line = await request.next_line(_SILENCE_S)
    if isinstance(line, bytes):
        return json_object(json_or_none(line))
    why = line.stderr if isinstance(line, RequestEnded) else line
    raise LaunchError("the environment is not made", where=node.name, why=_shown(why))


async def _send(
    request: AgentRequest, node: NodeConfig, wheels: Sequence[Wheel], report: Callable[[str], None]
) -> None:
    """Send the wheels, no more of them under way than the node's disk takes."""
    total, sent, received, tenth = sum(wheel.bytes for wheel in wheels), 0, 0, 0
    for wheel in wheels:
        with wheel.path.open("rb") as file:
            while block := await asyncio.to_thread(file.read, ACK_BYTES):
                request.send(block)
                sent += len(block)
                while sent - received > _UNDER_WAY * ACK_BYTES or (sent == total and received < total):
                    message = await _message(request, node)
                    if "problem" in message:
                        raise LaunchError("the wheels do not arrive", where=node.name, why=_shown(message["problem"]))
                    received = count_or_none(message.get("received")) or received
                if 10 * received // total > tenth:
                    tenth = 10 * received // total
                    report(f"{received / 1e6:,.1f} of {total / 1e6:,.1f} MB of wheels")


def _shown(text: object) -> str:
    return redact(plain(text, 300))
