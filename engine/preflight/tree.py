"""What lies in the workdir on each node, and where it differs: proof that a sync has done what it says.

Everything that the reference has must be the same everywhere. What a node has beyond that (outputs, logs) is told, and
is no difference: nothing of a node's own is ever deleted from here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError
from engine.preflight.answers import Tree
from engine.preflight.scene import Scene

LEFT_OUT = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    "*.pyc",
    ".venv",
    "venv",
    "node_modules",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".ipynb_checkpoints",
    ".tox",
    ".nox",
    ".flightdeck",
    ".DS_Store",
    "._*",
)
"""What each machine has of its own: histories, caches, environments; never copied and never compared."""
FILES = 20_000
"""More than a project has; a tree is compared that far, and it is said when there is more."""
WHOLE_BYTES = 64_000_000
"""A larger file is compared by its size: weights and data have checks of their own, which hash what matters."""
ALL_BYTES = 1_000_000_000
"""So much is hashed on a node, a second or two; the rest is compared by size."""
READ_LIMIT_S = 60.0
_NAMED = 4


@dataclass(frozen=True)
class Difference:
    """A node's tree against the reference. Paths are relative to the workdir, in order."""

    missing: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    """What only the node has."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.other)

    @property
    def in_the_way(self) -> tuple[str, ...]:
        """Files and links of the node's own where the reference has a folder: a copy would put the folder in their
        place."""
        folders = {path[:end] for path in self.missing for end, sign in enumerate(path) if sign == "/"}
        return tuple(path for path in self.own if path in folders)

    def words(self) -> str:
        """What differs, the first few by name."""
        parts = (("differ", self.other), ("missing", self.missing))
        return "; ".join(f"{word}: {_first(paths)}" for word, paths in parts if paths)

    def own_words(self) -> str:
        return f"{len(self.own):,} of its own ({_first(self.own)})" if self.own else ""


def compare(reference: Tree, there: Tree) -> Difference:
    """Where `there` is not as `reference`. Of a tree that was cut, what comes after the cut is not known and not
    compared; a file that either side did not hash is compared by its size."""
    last = min(
        (max(tree.entries, key=_order) for tree in (reference, there) if tree.cut and tree.entries),
        default=None,
        key=_order,
    )
    paths = sorted({*reference.entries, *there.entries}, key=_order)
    known = [path for path in paths if last is None or _order(path) <= _order(last)]
    missing = [path for path in known if path not in there.entries]
    own = [path for path in known if path not in reference.entries]
    both = [path for path in known if path in there.entries and path in reference.entries]
    other = [path for path in both if not _same(reference.entries[path], there.entries[path])]
    return Difference(tuple(missing), tuple(other), tuple(own))


def folders(config: FlightConfig) -> dict[tuple[str, str], NodeConfig]:
    """Each workdir of the cluster once: (host, workdir) → the first node that has it, the reference's first. That is
    this machine's, where it is a node; else the first node's."""
    found: dict[tuple[str, str], NodeConfig] = {}
    for node in sorted(config.nodes, key=lambda node: not node.local):
        found.setdefault((node.ssh, node.workdir), node)
    return found


async def trees(scene: Scene) -> dict[str, Tree | FlightDeckError]:
    """The tree of each of `folders`, by its node's name; where it could not be read, why."""
    nodes = list(folders(scene.config).values())
    return dict(
        zip((node.name for node in nodes), await asyncio.gather(*(_asked(scene, node) for node in nodes)), strict=True)
    )


def question(apart: Sequence[str]) -> dict[str, object]:
    """What worker.looks.tree is asked; `apart` are absolute paths that are no part of the tree."""
    return {
        "without": LEFT_OUT,
        "apart": list(apart),
        "files": FILES,
        "whole_bytes": WHOLE_BYTES,
        "all_bytes": ALL_BYTES,
    }


async def _asked(scene: Scene, node: NodeConfig) -> Tree | FlightDeckError:
    adapters = scene.config.job.mlx_lm.get("adapter_path")
    try:
        place = await scene.place_of(node)
        # What a training leaves, it leaves on one node.
        apart = [place.expanded(scene.path(node, str(adapters)))] if adapters else []
        workdir = scene.path(node, node.workdir)
        return await scene.look(
            node, "tree", workdir, json.dumps(question([*apart, place.root])), said=Tree, timeout_s=READ_LIMIT_S
        )
    except FlightDeckError as error:
        return error


def counted(tree: Tree) -> str:
    """What was read of a tree, in words."""
    sized = sum(1 for size, digest in tree.entries.values() if size >= 0 and digest is None)
    words = f"{len(tree.entries):,} files"
    words += f", {sized:,} of them large: compared by size" if sized else ""
    return words + (f", no more than {FILES:,} compared" if tree.cut else "")


def _same(here: tuple[int, str | None], there: tuple[int, str | None]) -> bool:
    return here[0] == there[0] and (here[1] == there[1] or None in (here[1], there[1]))


def _first(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:_NAMED])
    return shown + (f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else "")


def _order(path: str) -> tuple[bytes, ...]:
    """The look's order: folder by folder."""
    return tuple(part.encode(errors="replace") for part in path.split("/"))
