"""Python environments that Flight Deck makes on nodes, each in a folder of its own below the node root: the pythons and
environments of a node, which one would be made, and the making."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import Field, ValidationError

from engine.cluster.probe_results import ShortText
from engine.cluster.transfer import next_report
from engine.cluster.transport.base import Completed
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError, plural, size_text
from engine.measurements import Count
from engine.models import FrozenModel
from engine.node.bootstrap import ROOT, node_root
from engine.node.environment import MARKER
from engine.security.paths import path_fault
from engine.security.redact import redact
from engine.security.sanitise import json_or_none, plain

FOLDER = "environments"
"""Below the node root."""
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""This machine's Python."""
_OLDEST = (3, 10)
"""The first with wheels of mlx."""
_LARGE_BYTES, _SMALL_BYTES = 1_500_000_000, 60_000_000
"""Room for an environment with mlx or PyTorch, and for any other."""
_INSPECT_LIMIT_S = 60.0
_SILENT_S = 1800.0
"""Without a line of output: a large package, on a slow disk or network, takes its time."""
_MARK = "flightdeck-environment"
_ASK = (
    "import platform as p, sys; "
    "print(p.python_version(), sys.platform, p.machine(), p.mac_ver()[0] or p.libc_ver()[1] or 'musl')"
)
_ANSWER = re.compile(r"(3\.[0-9]{1,2})[\w.+]{0,20} (linux|darwin) (\w{1,20}) ([0-9.]{1,20}|musl)")
_REACH = """
import os, socket, urllib.parse
names = ("https_proxy", "HTTPS_PROXY", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
url = urllib.parse.urlsplit(next(filter(None, map(os.environ.get, names)), "https://pypi.org"))
socket.create_connection((url.hostname, url.port or url.scheme), 5)
"""
_PYTHONS = (
    "/opt/homebrew/bin/python3.*[0-9] /usr/local/bin/python3.*[0-9] /usr/bin/python3.*[0-9] "
    "/Library/Frameworks/Python.framework/Versions/3.*/bin/python3 "
    '"$HOME"/.local/share/uv/python/cpython-3.*/bin/python3 "$HOME"/.pyenv/versions/3.*/bin/python3 '
    '"$HOME"/miniforge3/bin/python3'
)
_INSPECT = f"""
say() {{ printf '{_MARK}\\t%s\\t%s\\t%s\\n' "$1" "$2" "$3"; }}
ask=$1 reach=$2 root=${{3:-$HOME/{ROOT}}} online=; shift 3
for uv in "$(command -v uv)" "$HOME"/.local/bin/uv "$HOME"/.cargo/bin/uv /opt/homebrew/bin/uv /usr/local/bin/uv; do
  if [ -x "$uv" ] && "$uv" --version >/dev/null 2>&1; then say uv "$uv"; break; fi
done
for python in "$@" "$(command -v python3)" {_PYTHONS}; do
  [ -x "$python" ] && [ ! -d "$python" ] || continue
  # Apple's stub opens a window that offers the developer tools where they are missing.
  case "$python" in /usr/bin/python3) [ "$(uname -s)" != Darwin ] || xcode-select -p >/dev/null 2>&1 || continue ;; esac
  answer=$("$python" -I -c "$ask" </dev/null 2>/dev/null) || continue
  say python "$python" "$answer"
  [ "$online" ] || {{ online=no; "$python" -I -c "$reach" </dev/null >/dev/null 2>&1 && online=yes; }}
done
say online "$online"
say free "$(df -Pk "$HOME" | awk 'NR == 2 {{ print $4 }}')"
for marker in "$root"/{FOLDER}/*/{MARKER}; do [ ! -f "$marker" ] || say made "$(cat "$marker")"; done
say end
"""
_REMOVE = 'rm -rf "$1" "$1".*'


class BasePython(FrozenModel):
    """A python that environments can be made of."""

    path: str
    minor: str
    """Its version, such as "3.12"."""
    system: str
    """sys.platform."""
    machine: str
    release: str
    """The version of macOS or glibc; "musl" without one."""

    @property
    def fits(self) -> bool:
        """There are wheels of mlx for it: not for an Intel python on a Mac."""
        return _numbers(self.minor) >= _OLDEST and (self.system, self.machine) != ("darwin", "x86_64")

    @property
    def markers(self) -> dict[str, str]:
        """The environment of PEP 508."""
        system = self.system.capitalize()
        version = {"python_version": self.minor, "python_full_version": f"{self.minor}.0"}
        cpython = {"implementation_name": "cpython", "platform_python_implementation": "CPython", "os_name": "posix"}
        return {
            **version,
            **cpython,
            "sys_platform": self.system,
            "platform_system": system,
            "platform_machine": self.machine,
        }


class MadeEnvironment(FrozenModel):
    """One on a node that is whole."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    made_at: Annotated[float, Field(ge=0, le=1e11)]
    bytes: Count
    packages: Annotated[dict[ShortText, ShortText], Field(max_length=2000)]
    """Name → version."""


class NodePythons(FrozenModel):
    """A node's environments, and its means to make one."""

    uv: str | None = None
    pythons: tuple[BasePython, ...] = ()
    environments: tuple[MadeEnvironment, ...] = ()
    free_bytes: int | None = None
    online: bool = False
    """The package index can be reached."""
    problem: str = ""
    """Why nothing is known."""


class EnvironmentPlan(FrozenModel):
    """The environment that would be made on one host."""

    node: str
    ssh: str
    id: str = ""
    python: str = ""
    """The environment's, as `python` of [[node]] has it."""
    base: BasePython | None = None
    """Its version is the environment's; without a path uv has to bring it."""
    agent: str = ""
    """The python that its agent runs with."""
    uv: str | None = None
    requirements: tuple[str, ...] = Field(default=(), exclude=True, repr=False)
    """An index among them may have a password."""
    online: bool = True
    """Packages come from the index; else as wheels from this machine."""
    made: bool = False
    """It is there already."""
    problem: str = ""
    """Why none can be made, with what to do."""

    def describe(self) -> str:
        if self.problem or self.base is None or self.made:
            return self.problem or f"{self.python} is there"
        python = f"Python {self.base.minor}" + ("" if self.base.path else ", which uv brings,")
        source = "from the package index" if self.online else "from wheels that this machine sends"
        packages = plural(len(self.requirements), "requirement")
        return f"{self.python}: {packages} {source}, by {'uv' if self.uv else 'venv and pip'} with {python}".rstrip(",")

    @property
    def folder(self) -> str:
        return self.python.removesuffix("/bin/python")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


async def inspect_node(fleet: Fleet, node: NodeConfig) -> NodePythons:
    """Never raises for a node that cannot answer: `problem` then says why."""
    more = [str(node_root()), f"{sys.base_prefix}/bin/python3"] if node.local else [""]
    try:
        argv = ["/bin/sh", "-c", _INSPECT, "sh", _ASK, _REACH, *more]
        return parse_pythons(await fleet.to(node).run(argv, timeout_s=_INSPECT_LIMIT_S))
    except (FlightDeckError, OSError) as error:
        return NodePythons(problem=plain(error, 300))


def parse_pythons(done: Completed) -> NodePythons:
    """From the script's output, with whatever a shell's start files printed around it."""
    report, pythons, made = dict[str, str](), dict[str, BasePython](), list[MadeEnvironment]()
    for line in done.stdout.decode(errors="replace").splitlines():
        mark, kind, value, answer = (*line.split("\t", 3), "", "", "")[:4]
        is_path = value.startswith("/") and path_fault(value) is None
        if mark != _MARK:
            continue
        if kind == "made":
            with contextlib.suppress(ValidationError):
                made.append(MadeEnvironment.model_validate(json_or_none(value)))
        elif kind == "python" and is_path and (match := _ANSWER.fullmatch(answer)):
            fields = zip(("minor", "system", "machine", "release"), match.groups(), strict=True)
            pythons.setdefault(value, BasePython(path=value, **dict(fields)))
        elif kind != "uv" or is_path:
            report.setdefault(kind, value)
    if "end" not in report:
        why = plain(done.exit_output, 200) if done.code is not None else f"no answer within {_INSPECT_LIMIT_S:g} s"
        return NodePythons(problem=f"its pythons are not known: {why}")
    kilobytes = report.get("free", "")
    return NodePythons(
        uv=report.get("uv"), pythons=tuple(pythons.values()), environments=tuple(made),
        free_bytes=1024 * int(kilobytes) if re.fullmatch(r"[0-9]{1,15}", kilobytes) else None,
        online=report.get("online") == "yes",
    )  # fmt: skip


def choose_minor(nodes: Iterable[NodePythons]) -> str:
    """This machine's Python where every node can have it, else the newest that every node has."""
    # uv brings any.
    bound = [{base.minor for base in node.pythons if base.fits} for node in nodes if not node.uv and not node.problem]
    common = set[str].intersection(*bound) if bound else {HERE}
    return HERE if HERE in common or not common else max(common, key=_numbers)


def plan_environment(
    node: NodeConfig, there: NodePythons, minor: str, requirements: Callable[[Mapping[str, str]], Sequence[str]]
) -> EnvironmentPlan:
    """`requirements`: on a python with these markers."""
    plan = EnvironmentPlan(node=node.name, ssh=node.ssh, uv=there.uv, online=there.online)
    fitting = [base for base in there.pythons if base.fits and base.minor == minor]
    if there.uv and not fitting:
        fitting = [base.model_copy(update={"path": "", "minor": minor}) for base in there.pythons]
    if there.problem or not fitting:
        return plan.model_copy(update={"problem": there.problem or _unfit(there, minor)})
    base, root = fitting[0], node_root() if node.local else f"~/{ROOT}"
    wanted = tuple(requirements(base.markers))
    # Without what is only the way to a package, and may be a secret.
    content = [sorted(line for line in wanted if not line.startswith("-")), minor, base.system, base.machine]
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    made = any(one.id == name for one in there.environments)
    large = there.online and any(re.match(r"(mlx|torch)\b", line) for line in wanted)
    problem, room = "", _LARGE_BYTES if large else _SMALL_BYTES
    if not made and (there.free_bytes or room) < room:
        problem = f"{size_text(there.free_bytes or 0)} are free there, and {size_text(room)} needed: make room"
    python = f"{root}/{FOLDER}/{name}/bin/python"
    update = {"id": name, "python": python, "base": base, "requirements": wanted, "made": made, "problem": problem}
    return plan.model_copy(update={**update, "agent": base.path or there.pythons[0].path})


def _unfit(there: NodePythons, minor: str) -> str:
    """Why no environment can be made, and what to do."""
    newest = max(there.pythons, key=lambda base: _numbers(base.minor), default=None)
    intel = newest is not None and (newest.system, newest.machine) == ("darwin", "x86_64")
    if newest is None:
        problem = "no python was found there"
    elif newest.fits:
        problem = f"it has no Python {minor}, but {', '.join(dict.fromkeys(base.minor for base in there.pythons))}"
    else:
        whose = ", of Xcode" if newest.system == "darwin" and newest.path == "/usr/bin/python3" else ""
        problem = f"its newest Python is {newest.minor}{' for Intel' * intel} ({newest.path}{whose}), and MLX needs"
        problem += f" {'.'.join(map(str, _OLDEST))} or newer{', for Apple silicon' * intel}"
    way = "python.org, brew" if newest is None or newest.system == "darwin" else f"with python{minor}-venv"
    uv = f"`uv python install {minor}`" if there.uv else "install uv (https://docs.astral.sh/uv)"
    return f"{problem}: {uv}, or install Python {minor} ({way})"


async def remove_environment(fleet: Fleet, node: NodeConfig, name: str) -> None:
    """Raises LaunchError, NodeUnreachable, OSError."""
    folder = f"{node_root() if node.local else f'~/{ROOT}'}/{FOLDER}/{name}"
    done = await fleet.to(node).run(["/bin/sh", "-c", _REMOVE, "sh", folder], timeout_s=_SILENT_S)
    if done.code != 0:
        raise LaunchError(f"environment {name} is not removed", where=node.name, why=plain(done.exit_output, 300))


async def make_environment(
    fleet: Fleet,
    plan: EnvironmentPlan,
    send_wheels: Callable[[NodeConfig, str], Awaitable[object]],
    report: Callable[[str], None],
) -> MadeEnvironment:
    """`send_wheels` puts them into a folder of the node, where that reaches no index. Raises TransferRefused with the
    reason why it is not made, LaunchError, NodeUnreachable, OSError; what has been loaded by then is used the next
    time."""
    assert plan.base is not None
    node, wheels = NodeConfig(name=plan.node, ssh=plan.ssh, python=plan.agent, workdir="~"), None
    if not plan.online:
        await send_wheels(node, wheels := f"{plan.folder}.wheels")
    lines = [line for line in plan.requirements if plan.online or not line.startswith("-")]
    base = {"python": plan.base.path or plan.base.minor, "uv": plan.uv}
    asked = {**base, "folder": plan.folder, "requirements": lines, "wheels": wheels}
    with contextlib.closing(await fleet.agent(node).start_probe("environment")) as request:
        request.send_json(asked)
        while "line" in (answer := await next_report(request, node, _SILENT_S)):
            report(redact(plain(answer["line"], 300)))
    try:
        return MadeEnvironment.model_validate(answer.get("made"))
    except ValidationError as error:
        raise LaunchError("its environment cannot be used", where=plan.node, why=plain(error, 300)) from error
