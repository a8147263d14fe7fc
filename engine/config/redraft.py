"""Puts other nodes and settings of the job into the text of a flightdeck.toml that there is; all else stays."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config.draft import DraftNode, node_lines, unique_names
from engine.config.edit import holds, lines_of, set_key, set_keys
from engine.config.overrides import Settings, overridden
from engine.errors import InputError

_SECTION = re.compile(r"^(?=[ \t]*\[)", re.MULTILINE)
_NODE = re.compile(r"[ \t]*\[\[\s*node\s*\]\]")


def redraft(before: str, nodes: Sequence[DraftNode], changes: Settings) -> str:
    """`before` with these nodes as its ranks and these keys. A node that it has keeps its name, its other
    keys and its comments. Raises InputError for a text that is no TOML or has a form that is only for a person to
    change."""
    try:
        wanted: dict[str, Any] = tomllib.loads(before)
        sections = _SECTION.split(before if before.endswith("\n") else before + "\n")
        lines = lines_of(_with_nodes(sections, wanted, nodes))
        wanted, _ = overridden(wanted, changes, Path())
        set_keys(lines, wanted, changes)
        text = "\n".join(lines) + "\n"
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError("the file cannot be changed", why=str(error), todo="correct it, or move it away") from error
    if not holds(text, wanted):
        raise InputError("the file cannot be changed", why="it has an unusual form", todo="change it by hand")
    return text


def _with_nodes(sections: Sequence[str], wanted: dict[str, Any], nodes: Sequence[DraftNode]) -> str:
    """Puts them into `wanted`, too."""
    places = [place for place, section in enumerate(sections) if _NODE.match(section)]
    present = list(zip(wanted.get("node", []), (sections[place] for place in places), strict=True))
    kept = [_taken(present, node) for node in nodes]
    names = unique_names([name or node.name for (name, _, _), node in zip(kept, nodes, strict=True)])
    texts, wanted["node"] = [], []
    for node, name, (_, table, section) in zip(nodes, names, kept, strict=True):
        if section is None:
            section = "\n".join(node_lines(node, name)) + "\n\n"
            wanted["node"] += tomllib.loads(section)["node"]
        else:
            keys = {"python": node.python, "ips": list(node.ips)}
            changed = {key: value for key, value in keys.items() if value}
            lines = lines_of(section)
            for key, value in changed.items():
                set_key(lines, "node", key, value)
            section = "\n".join(lines) + "\n"
            wanted["node"].append({**table, **changed})
        texts.append(section)
    at = next(
        (n for n, section in enumerate(sections) if _NODE.match(section) or re.match(r"\s*\[job\]", section)),
        len(sections),
    )
    others = [section for place, section in enumerate(sections) if place not in places]
    # Comments before the table after the nodes are that table's.
    after = re.search(r"(?:^[ \t]*(?:#.*)?\n)*\Z", sections[places[-1]], re.MULTILINE) if places else None
    if after is not None and kept[-1][2] != sections[places[-1]]:
        texts.append(after[0])
    return "".join([*others[:at], *texts, *others[at:]])


def _taken(present: list[tuple[dict[str, Any], str]], node: DraftNode) -> tuple[str | None, dict[str, Any], str | None]:
    """Name, table and text of the first node that is reached as this one, which is used up."""
    for place, (table, section) in enumerate(present):
        if table.get("ssh", "127.0.0.1") == node.ssh:
            del present[place]
            return table.get("name"), table, section
    return None, {}, None
