"""Writes a first flightdeck.toml: what was found and what was meant, with a comment where a person has to look."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.config.places import address_form, device_form, host_form
from engine.errors import InputError, StateError
from engine.security.hosts import SshTarget
from engine.security.identifiers import made_identifier, shown
from engine.security.sanitise import sanitise

PYTHON_GUESS = "~/mlx/.venv/bin/python"
"""Where docs/two-macs.md has it made."""
MODEL_GUESS, DATA_GUESS = "~/models/Qwen3-0.6B", "~/data/my-dataset"
_COMMENT_COLUMN = 40
_COMMENT_WIDTH = 160


@dataclass(frozen=True)
class DraftNode:
    """One rank of the draft."""

    name: str
    ssh: str
    """`[user@]host[:port]`; 127.0.0.1 is this machine."""
    python: str | None = None
    """An interpreter there that has mlx and mlx-lm; None: nobody could tell, a guess is written."""
    about: str = ""
    """What is known of the host, for the comment."""
    doubt: str = ""
    """Why `python` could not be found out, in one line."""
    ips: tuple[str, ...] = ()
    """Empty: chosen from the nodes' facts at launch."""
    rdma: tuple[str | None, ...] | None = None


@dataclass(frozen=True)
class DraftJob:
    """What of the job is known; None is a placeholder that a person replaces."""

    model: str | None = None
    data: str | None = None
    config: str | None = None
    """An mlx-lm YAML beside the file, which may name the model and the data."""
    has_model: bool = False
    """Whether `config` names the model."""
    has_data: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks."""


def draft(
    nodes: Sequence[DraftNode],
    *,
    cluster: str = "cluster",
    backend: str = "auto",
    job: DraftJob | None = None,
) -> str:
    """The text of a flightdeck.toml that `load_config` accepts as it is. Names that are taken get a number. Raises
    InputError for a host, an address or a device that is none, or when there is no node."""
    if not nodes:
        raise InputError("there is no host to write down", todo="name some: flightdeck init ana@ultra.local …")
    for node in nodes:
        _check(node)
    lines = [
        "# MLX Flight Deck: what to run on and what to train. Written by `flightdeck init`, yours to edit.",
        "# `flightdeck nodes` shows what is there, `flightdeck preflight` whether it would work.",
        "",
        "[cluster]",
        _set("name", made_identifier(cluster, "cluster")),
        _set(
            "backend", backend, "auto takes RDMA where all of it is there, else the ring" if backend == "auto" else ""
        ),
        "",
        "# One [[node]] for each rank, rank 0 first. Paths are the node's own; ~ is the home of its user.",
    ]
    for node, name in zip(nodes, unique_names([node.name for node in nodes]), strict=True):
        lines += ["", *_node(node, name)]
    lines += ["", *_job(job or DraftJob(), len(nodes))]
    return "\n".join(lines) + "\n"


def checked_host(host: str) -> SshTarget:
    """The host as ssh reaches it. Raises InputError for one that a configuration would refuse."""
    if accepted := host_form(host):
        raise InputError(f"{shown(host)} is no host", todo=f"give {accepted}")
    return SshTarget.parse(host)


def unique_names(names: Sequence[str]) -> list[str]:
    """Names that a configuration accepts, each once: "Ana's Mac" gives "Ana-s-Mac", a second one "Ana-s-Mac-2"."""
    made: list[str] = []
    for rank, name in enumerate(names):
        base = made_identifier(name, f"node{rank}")
        number, chosen = 1, base
        while chosen in made:
            number += 1
            chosen = f"{base[: 63 - len(str(number))]}-{number}"
        made.append(chosen)
    return made


def write_draft(path: Path, text: str, *, force: bool = False) -> None:
    """Write the file whole or not at all; with `force` in the place of another. Raises InputError when there is one
    already, StateError when it cannot be written."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if force:
                temporary.replace(path)
            else:
                # Unlike a rename this fails for a file that has come meanwhile.
                path.hardlink_to(temporary)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as there:
        raise already_there(path) from there
    except OSError as error:
        raise StateError("cannot be written", where=str(path), why=error.strerror or str(error)) from error


def already_there(path: Path) -> InputError:
    """The refusal to write over `path`."""
    return InputError(f"{path} is there already", todo="--force writes over it, -o FILE writes another")


def _check(node: DraftNode) -> None:
    checked_host(node.ssh)
    for address in node.ips:
        if accepted := address_form(address):
            raise InputError(f"{node.name}: {shown(address)} is no address", todo=f"give {accepted}")
    for device in node.rdma or ():
        if device is not None and (accepted := device_form(device)):
            raise InputError(f"{node.name}: {shown(device)} is no device", todo=f"give {accepted}")


def _node(node: DraftNode, name: str) -> list[str]:
    lines = [_commented("[[node]]", node.about), _set("name", name), _set("ssh", node.ssh)]
    if node.python is not None:
        lines.append(_set("python", node.python))
    else:
        lines.append(_set("python", PYTHON_GUESS, f"NOT VERIFIED: {node.doubt or 'nobody has asked'}"))
    if node.ips:
        lines.append(_set("ips", list(node.ips)))
    if node.rdma is not None:
        # TOML has no null: the node itself is an empty text.
        lines.append(_set("rdma", [device or "" for device in node.rdma]))
    return lines


def _job(job: DraftJob, ranks: int) -> list[str]:
    lines = ["[job]"]
    if job.config is not None:
        lines.append(_set("config", job.config, "mlx-lm's YAML; keys here win"))
    if job.model is not None:
        lines.append(_set("model", job.model, "on every node"))
    elif not job.has_model:
        lines.append(_set("model", MODEL_GUESS, "CHANGE ME: a directory of mlx-lm's form, on every node"))
    if job.data is not None:
        lines.append(_set("data", job.data, "on every node"))
    elif not job.has_data:
        lines.append(_set("data", DATA_GUESS, "CHANGE ME: train.jsonl, valid.jsonl; on every node"))
    if job.config is None:
        lines += [
            _set("fine_tune_type", "lora", "lora, dora or full"),
            _set("batch_size", ranks * math.ceil(8 / ranks), "global, as in mlx-lm"),
            _set("iters", 1000),
        ]
    if job.env:
        lines.append("env = {" + ", ".join(f"{_toml(name)} = {_toml(value)}" for name, value in job.env.items()) + "}")
    lines += [
        "# Any key of an mlx-lm training YAML may stand here. Or, in place of all of it, a program of your own:",
        '# command = ["python", "my_script.py"]',
    ]
    return lines


def _set(key: str, value: str | int | list[str], comment: str = "") -> str:
    return _commented(f"{key} = {_toml(value)}", comment)


def _toml(value: str | int | list[str]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # JSON's texts are TOML's but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _commented(code: str, comment: str) -> str:
    comment = sanitise(comment.encode(errors="replace"), _COMMENT_WIDTH).strip()
    return f"{code:<{_COMMENT_COLUMN - 1}} # {comment}" if comment else code
