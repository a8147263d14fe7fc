"""What a node's python says of itself: its version, and whether mlx and mlx-lm can really be imported by it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.security.sanitise import plain
from engine.transport.base import Transport

IMPORT_SCRIPT = Path(__file__).with_name("import_script.py")
IMPORT_LIMIT_S = 60.0
"""For mlx-lm from a cold disk; from a warm one it takes one or two."""

_ASK_MLX = """
import json, platform, sys
said = {"python": platform.python_version(), "linux": sys.platform.startswith("linux")}
said["venv"] = sys.prefix != sys.base_prefix
try:
    import mlx.core as mx
    said["mlx"] = mx.__version__
    said["backends"] = [name for name in ("ring", "jaccl", "nccl") if mx.distributed.is_available(name)]
except Exception as error:
    said["mlx_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Interpreter:
    """What one node's python says of itself; None is "not importable", with the reason in `problem`."""

    python: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    backends: tuple[str, ...] = ()
    """Of MLX's distributed part, those that this build has."""
    problem: str | None = None
    absent: bool = False
    """There is no such interpreter."""
    venv: bool = False
    linux: bool = sys.platform.startswith("linux")
    """The head's own system stands for that of an interpreter which did not say."""

    def words(self) -> str:
        seen = ", ".join(
            f"{name} {version}"
            for name, version in (("python", self.python), ("mlx", self.mlx), ("mlx-lm", self.mlx_lm))
            if version
        )
        return "; ".join(part for part in (seen, self.problem) if part)


async def ask(transport: Transport, python: str) -> Interpreter:
    """Import mlx with `python` on a node (a tenth of a second), mlx-lm not. Raises NodeUnreachable."""
    try:
        finished = await transport.run([python, "-c", _ASK_MLX], timeout_s=IMPORT_LIMIT_S)
    except FileNotFoundError:
        return Interpreter(problem=f"no such interpreter: {python}", absent=True)
    except OSError as error:
        return Interpreter(problem=f"{python} cannot be run: {error.strerror}")
    if finished.code is None:
        return Interpreter(problem=f"{python} did not answer in {IMPORT_LIMIT_S:.0f} s")
    return parse(finished.stdout, finished.code, finished.last_words)


async def with_mlx_lm(transport: Transport, python: str, seen: Interpreter, *, imported: bool = True) -> Interpreter:
    """`seen`, and whether that interpreter can also import mlx-lm: seconds of work where nothing proves it; not
    `imported`, it is only looked for. Raises NodeUnreachable."""
    if seen.python is None:
        return seen
    try:
        finished = await transport.run(
            [python, "-", "import" if imported else "find"], timeout_s=IMPORT_LIMIT_S, stdin=IMPORT_SCRIPT.read_bytes()
        )
    except OSError as error:
        return _with_problem(seen, f"{python} cannot be run: {error.strerror}")
    if finished.code is None:
        return _with_problem(seen, f"mlx-lm cannot be imported: not within {IMPORT_LIMIT_S:.0f} s")
    said = _said(finished.stdout, ("mlx_lm", "mlx_lm_error"))
    if said is None:
        words = plain(finished.last_words, 200) or "it said nothing"
        return _with_problem(seen, f"mlx-lm cannot be imported: python ended with {finished.code}: {words}")
    if "mlx_lm_error" in said:
        return _with_problem(seen, f"mlx-lm cannot be imported: {plain(said['mlx_lm_error'], 300)}")
    return replace(seen, mlx_lm=plain(said["mlx_lm"], 60))


def parse(stdout: bytes, code: int, last_line: str) -> Interpreter:
    """From what the interpreter printed to what it is. Other lines around ours are passed over."""
    said = _said(stdout, ("python",))
    if said is None:
        words = plain(last_line, 200) or "it said nothing"
        return Interpreter(problem=f"the interpreter ended with {code}: {words}")
    backends = said.get("backends")
    return Interpreter(
        plain(said["python"], 60),
        plain(said["mlx"], 60) if "mlx" in said else None,
        backends=tuple(plain(name, 20) for name in backends[:8]) if isinstance(backends, list) else (),
        problem=f"mlx cannot be imported: {plain(said['mlx_error'], 300)}" if "mlx_error" in said else None,
        venv=bool(said.get("venv")),
        linux=bool(said.get("linux")),
    )


def _said(stdout: bytes, any_of: tuple[str, ...]) -> Mapping[str, Any] | None:
    for line in reversed(stdout.splitlines()):
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and any(key in said for key in any_of):
            return said
    return None


def _with_problem(seen: Interpreter, problem: str) -> Interpreter:
    return replace(seen, problem="; ".join(part for part in (seen.problem, problem) if part))
