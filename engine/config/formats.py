"""Checks the form of paths, hosts, addresses, device names and metric patterns in a configuration, and resolves paths
for their node. The `*_form` functions return a description of what is accepted, or None if the value is valid."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from engine.errors import InputError
from engine.protocol.manifest import DATA_PREFIX, PUSHED, hub_name, path_is_below, split_slices
from engine.protocol.metric_patterns import LONGEST_LINE, LONGEST_NUMBER, LOSSES, metric_name
from engine.protocol.partition import parse_split
from engine.security.identifiers import LOCAL, SSH_TARGET_FORM, SshTarget
from engine.security.paths import path_fault
from engine.security.redact import redact

ON_NODE = "a path on the node: absolute, or below the home directory of its user (~/…)"
_OTHER_NAMES = frozenset({"localhost", "::1", "ip6-localhost"})
_REQUIREMENT = re.compile(r"(--(extra-)?index-url[ =]|[A-Za-z0-9][\w.-]*\s*(\[|[<>=!~;@]|--hash|$))[ -~]{0,2000}")
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def path_form(text: object) -> str | None:
    if (fault := path_fault(text)) is not None:
        return fault
    if ".." in Path(str(text)).parts:
        return "a path without .. (absolute, below ~, or below the folder of this file)"
    try:
        Path(str(text)).expanduser()
    except RuntimeError:
        return "a path below the home directory of an existing user"
    return None


def data_form(text: object) -> str | None:
    """Like `path_form`, for `data` of [job], which may be a data set of the Hub. What was pushed has its folder's name,
    and that of another project may be the same."""
    if not str(text).startswith(DATA_PREFIX):
        return path_form(text)
    if str(text).startswith(DATA_PREFIX + PUSHED) and "@" not in str(text):
        return "the data itself with [data] push = true, or what was pushed with its revision, @…"
    return None if hub_name(str(text)) else "hf:org/set or hf:org/set@REVISION; [data] subset names one of its subsets"


def remote_path_form(text: object) -> str | None:
    """Like `path_form`, for a path on another machine, which cannot be relative."""
    if (fault := path_fault(text)) is not None:
        return fault
    if ".." in str(text).split("/"):
        return "a path without .. (absolute, or below ~)"
    return None if text == "~" or str(text).startswith(("/", "~/")) else ON_NODE


def resolved(text: str, base: Path) -> str:
    """The absolute path: ~ expanded, relative ones below `base`. Symlinks, such as a venv's python, are kept."""
    return os.path.normpath(base / Path(text).expanduser())


def interpreter(text: str, base: Path) -> str:
    """Like `resolved`, but a name without a folder is searched on PATH first."""
    program = shutil.which(text) if os.sep not in text else None
    return str(Path(program).absolute()) if program else resolved(text, base)


def host_form(text: object) -> str | None:
    try:
        target = SshTarget.parse(text if isinstance(text, str) else "")
    except InputError as refused:
        return SSH_TARGET_FORM + (f"; {refused.why}" if refused.why else "")
    if target.host.lower() in _OTHER_NAMES:
        return f"{LOCAL}: localhost may resolve to ::1, and MLX's ring needs IPv4 addresses"
    return None


def address_form(text: object) -> str | None:
    try:
        address = ipaddress.IPv4Address(text if isinstance(text, str) else "")
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast or address.is_reserved:
        return "an IPv4 address of the node, such as 192.168.0.1: MLX's ring accepts no names and no IPv6"
    return None


def device_form(device: object) -> str | None:
    """A list is one device for each of several cables."""
    names = device if isinstance(device, (list, tuple)) and device else [device]
    if all(isinstance(name, str) and _DEVICE.fullmatch(name) for name in names) and len(set(names)) == len(names):
        return None
    return 'the name of an RDMA device such as "rdma_en5", a list of several, or "" for none'


def split_form(text: str, nodes: int | None = None) -> str | None:
    try:
        ranges = len(parse_split(text))
    except ValueError as error:
        return f'one range per rank, such as "0-8,8-36": {error}'
    return f"{nodes} ranges, one per node, not {ranges}" if nodes not in (None, ranges) else None


def splits_form(splits: Mapping[str, str]) -> str | None:
    """For `splits` of [data]."""
    try:
        for text in splits.values():
            split_slices(text)
    except ValueError as error:
        return f'splits of the data set by ours, such as {{ train = "train[:80%]", valid = "train[-10%:]" }}: {error}'
    return None if "train" in splits or not splits else "a table with train"


def subset_form(text: str) -> str | None:
    return None if path_is_below(text) else "the name of a subset or folder of the data set"


_PARSER: Final[Any] = import_module("re._parser")
"""That of re itself."""
_MOST_WAYS: Final = 1_000_000_000
"""At one place in a line: two repeats of anything, and some of digits; there are fewer, as all share one line."""
_DIGITS: Final = frozenset("0123456789.")
_ALL: Final = frozenset(map(chr, range(129)))
"""ASCII, and one for all others."""
_CATEGORIES: Final = {"DIGIT": str.isdigit, "SPACE": str.isspace, "WORD": lambda c: c.isalnum() or c in "_\x80"}
_BOUNDED: Final = (
    "a regular expression that has few ways to try a line: no repeat of what repeats or has alternatives itself, and "
    "at most two such as .* before what must follow; bound them (.{0,40}), or repeat only what cannot follow ([^,]*,)"
)
_ACCEPTED: Final = "a regular expression with groups such as step (?P<step>[0-9]+) .* loss (?P<loss>[0-9.]+)"


def pattern_form(text: object) -> str | None:
    """For a job's own pattern of its metrics. It is tried on every line that a rank prints, by the thread that keeps
    the rank's log, where a match cannot be interrupted: so the ways in which it can try a line are bounded."""
    if not isinstance(text, str) or len(text) > LONGEST_LINE:
        return f"{_ACCEPTED}, of at most {LONGEST_LINE} characters"
    try:
        named = {metric_name(name) for name in re.compile(text).groupindex}
        ways, _ = _ways(_PARSER.parse(text), frozenset(), fails=False)
    except (re.error, RecursionError, OverflowError) as error:
        return f"{_ACCEPTED}: {error}"
    if not named & {"step", "steps"} or not named & LOSSES:
        return f"{_ACCEPTED}: step and loss (or val_loss) are needed"
    return _BOUNDED if ways > _MOST_WAYS else None


def _ways(parts: Iterable[Any], after: frozenset[str], *, fails: bool) -> tuple[float, frozenset[str]]:
    """The ways in which a sequence can be tried at one place, and the characters that it can begin with. `after`: those
    that can follow it. `fails`: what follows can fail, so that other ways are tried."""
    ways: float = 1
    for op, value in reversed(list(parts)):
        match str(op):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                after, fails = _characters(str(op), value), True
            case "AT":
                fails = True
            case "SUBPATTERN":
                inner, after = _ways(value[-1], after, fails=fails)
                ways, fails = ways * inner, True
            case "BRANCH":
                branches = [_ways(branch, after, fails=fails) for branch in value[1]]
                ways, fails = ways * 2 * sum(inner for inner, _ in branches), True
                after = frozenset().union(*(begins for _, begins in branches))
            case "ASSERT" | "ASSERT_NOT":
                ways, fails = ways * _ways(value[1], _ALL, fails=True)[0], True
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, repeated = value
                width = repeated.getwidth()
                inner, begins = _ways(repeated, after if most <= 1 else _ALL, fails=fails)
                if most > 1 and (inner > 1 or width[0] != width[1]):
                    return float("inf"), _ALL
                if most <= 1:
                    ways *= inner + 3 * (least != most and fails and bool(begins & after))
                elif fails and begins & after:
                    ways *= max(1, min(int(most), LONGEST_NUMBER if begins <= _DIGITS else LONGEST_LINE) - least + 1)
                after, fails = (begins if least else begins | after), fails or least > 0
            case _:
                # A reference to a group, and what Python 3.9 on a node does not know.
                return float("inf"), _ALL
    return ways, after


def _characters(op: str, value: Any) -> frozenset[str]:
    """In either case, as it may not count."""
    if op == "ANY":
        return _ALL
    if op == "IN":
        some = frozenset().union(*(_characters(str(op), item) for op, item in value))
        return _ALL - some if str(value[0][0]) == "NEGATE" else some
    if op == "NEGATE":
        return frozenset()
    if op == "CATEGORY":
        some = frozenset(filter(_CATEGORIES[str(value).rpartition("_")[2]], _ALL))
        return _ALL - some if "_NOT_" in str(value) else some
    low, high = value if op == "RANGE" else (value, value)
    text = "".join(chr(min(code, 128)) for code in range(min(low, 128), min(high, 128) + 1))
    characters = frozenset(text + text.lower() + text.upper()) & _ALL
    return _ALL - characters if op == "NOT_LITERAL" else characters


def web_address_form(text: object) -> str | None:
    address = re.fullmatch(r"env:[A-Za-z_]\w{0,99}|https?://[\w.-]+(:\d{1,5})?([/?][!-~]*)?", str(text), re.ASCII)
    return None if address else "an http:// or https:// address without user and password, or env:NAME"


def listed_requirements_form(value: object) -> str | None:
    """As `requirements_form`; the list is kept with each run, and must have no password."""
    lines = value if isinstance(value, list | tuple) else ()
    if any("://" in str(line) and redact(str(line)) != str(line) for line in lines):
        return "a requirements file's path, as a line has a user or password, and the list is kept with each run"
    return requirements_form(value)


def requirements_form(value: object) -> str | None:
    """The path of a file, or lines for pip: packages by name, with hashes, or an option that names an index."""
    if value is None or isinstance(value, str):
        return path_form(value) if value is not None else None
    accepted = 'a list of packages by name and --index-url options, as ["mlx==0.32.1", "mlx-lm"], or a file\'s path'
    for number, line in enumerate(value if isinstance(value, list | tuple) else (None,), 1):
        if not isinstance(line, str) or not _REQUIREMENT.fullmatch(line) or "file:" in line:
            return f"{accepted}: line {number} is none of these"
    return None
