"""Writes a first flightdeck.toml from the hosts that were found and the job in a folder (an mlx-lm YAML, or data), with
a comment wherever the user has to decide; and sets keys of [job] in one that there is."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.config.documents import DocumentError, read_yaml
from engine.config.formats import address_form, data_form, device_form, host_form, path_form, subset_form
from engine.config.mlx_lm_keys import KEYS
from engine.errors import InputError, StateError
from engine.protocol.attempt import replacing
from engine.protocol.manifest import DATA_PREFIX
from engine.security.identifiers import SshTarget, make_identifier, safe_repr
from engine.security.sanitise import sanitise

if TYPE_CHECKING:
    from engine.config.models import RdmaRow

PYTHON_GUESS = "~/mlx/.venv/bin/python"
"""Where docs/quickstart.md creates it."""
UNSURE: Final = ("NOT VERIFIED", "CHANGE ME")
"""With these begin comments that hold no more once their key has another value."""
MODEL_GUESS, DATA_GUESS = "~/models/Qwen3-0.6B", "~/data/my-dataset"
SCHEMA: Final = Path(__file__).with_name("flightdeck.schema.json")
"""The JSON Schema for editors (`python -m tests.docs.generate`)."""
_COMMENT_COLUMN = 40
_COMMENT_WIDTH = 160


@dataclass(frozen=True)
class DraftNode:
    name: str
    ssh: str
    """`[user@]host[:port]`; 127.0.0.1 is this machine."""
    python: str | None = None
    """An interpreter on the node that has mlx and mlx-lm; if None, a guess is written."""
    about: str = ""
    """Known facts about the host, for the comment."""
    doubt: str = ""
    """Why `python` is unknown, in one line."""
    ips: tuple[str, ...] = ()
    """Empty: chosen from the nodes' interfaces at launch."""
    rdma: RdmaRow | None = None


@dataclass(frozen=True)
class DraftJob:
    """The known parts of the job; a placeholder that the user replaces stands for the others."""

    data: str | None = None
    config: str | None = None
    """An mlx-lm YAML in the same folder, which may set the model and the data."""
    has_model: bool = False
    has_data: bool = False
    push: bool = False
    """The data is this machine's, and is sent to the nodes at each launch."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of [job] that were chosen; data may be followed by its subset."""

    @property
    def missing(self) -> list[str]:
        """Keys of [job] for which a placeholder stands."""
        there = {"model": self.has_model, "data": self.data or self.has_data, **self.settings}
        return [key for key, given in there.items() if not given]


_NOTHING_KNOWN = DraftJob()


def draft(
    nodes: Sequence[DraftNode], *, cluster: str = "cluster", backend: str = "auto", job: DraftJob = _NOTHING_KNOWN
) -> str:
    """The text of a flightdeck.toml that `load_config` accepts. Duplicate names get a number. Raises InputError for an
    invalid host, address or device, and without nodes."""
    if not nodes:
        raise InputError("no hosts", todo="name some: flightdeck init ana@ultra.local …")
    for node in nodes:
        _check(node)
    lines = [
        f"#:schema {SCHEMA.as_uri()}",
        "# MLX Flight Deck: the nodes and the job. Written by `flightdeck init`; edit it as you like.",
        "# `flightdeck nodes` shows the nodes, `flightdeck preflight` checks whether the job would run.",
        "",
        "[cluster]",
        _set("name", make_identifier(cluster, "cluster")),
        _set("backend", backend, "auto uses RDMA or NCCL if possible, else TCP" if backend == "auto" else ""),
        "",
        "# One [[node]] per rank, rank 0 first. Paths are on the node; ~ is the home directory of its user.",
    ]
    for node, name in zip(nodes, unique_names([node.name for node in nodes]), strict=True):
        lines += ["", *node_lines(node, name)]
    settings = split_subset(job.settings)
    subset = settings.pop("data.subset", None)
    lines += ["", *_job(replace(job, settings=settings), len(nodes))]
    if job.push:
        lines += ["", "[data]", _set("push", True, "at each launch the nodes are sent what has changed")]
    elif subset is not None:
        lines += ["", "[data]", _set("subset", subset, "of those that the data set has")]
    return "\n".join(lines) + "\n"


def data_and_subset(text: str) -> tuple[str, str | None]:
    """A data set of the Hub with its subset behind it, "hf:openai/gsm8k main"; anything else as it is."""
    name, _, subset = text.partition(" ")
    return (name, subset.strip()) if name.startswith(DATA_PREFIX) and subset.strip() else (text, None)


def answer_form(key: str, text: str) -> str | None:
    """A description of what is accepted as `model` or `data`, in which a subset may follow; None if the text is."""
    if key == "model":
        return path_form(text)
    name, subset = data_and_subset(text)
    return data_form(name) or (subset_form(subset) if subset is not None else None)


def split_subset(settings: Mapping[str, object]) -> dict[str, object]:
    """With the subset behind the data set's name as data.subset."""
    name, subset = data_and_subset(str(settings.get("data", "")))
    return {**settings, "data": name, "data.subset": subset} if subset is not None else dict(settings)


def checked_host(host: str) -> SshTarget:
    """Raises InputError for a host that a configuration would refuse."""
    if accepted := host_form(host):
        raise InputError(f"{safe_repr(host)} is not a host", todo=f"give {accepted}")
    return SshTarget.parse(host)


def unique_names(names: Sequence[str]) -> list[str]:
    """Unique names that a configuration accepts: "Ana's Mac" becomes "Ana-s-Mac", a second one "Ana-s-Mac-2"."""
    made: list[str] = []
    for rank, name in enumerate(names):
        base = make_identifier(name, f"node{rank}")
        number, chosen = 1, base
        while chosen in made:
            number += 1
            chosen = f"{base[: 63 - len(str(number))]}-{number}"
        made.append(chosen)
    return made


def write_draft(path: Path, text: str, *, force: bool = False) -> None:
    """Write the file atomically; with `force` it replaces an existing file. Raises InputError if the file exists,
    StateError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            with replacing(path if force else temporary) as file:
                file.write(text.encode())
            if not force:
                # Unlike a rename, this fails if the file was created in the meantime.
                path.hardlink_to(temporary)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as there:
        raise _already_there(path) from there
    except OSError as error:
        raise StateError("cannot be written", where=str(path), why=error) from error


def check_target(path: Path, *, force: bool) -> None:
    """Raises as `write_draft` does, before anybody is asked for what it writes."""
    if path.is_dir() or (path.exists() and not force):
        raise _already_there(path)
    try:
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise StateError("cannot be written", where=str(path), why=error) from error


def _already_there(path: Path) -> InputError:
    force = "" if path.is_dir() else "--force overwrites it, "
    return InputError(f"{path} already exists", todo=f"{force}-o FILE writes another file")


def _check(node: DraftNode) -> None:
    checked_host(node.ssh)
    given = [(address, address_form(address), "an address") for address in node.ips]
    devices = [device for device in node.rdma or () if device is not None]
    given += [(str(device), device_form(device), "a device") for device in devices]
    for value, accepted, what in given:
        if accepted is not None:
            raise InputError(f"{node.name}: {safe_repr(value)} is not {what}", todo=f"give {accepted}")


def node_lines(node: DraftNode, name: str) -> list[str]:
    lines = [_commented("[[node]]", node.about), _set("name", name), _set("ssh", node.ssh)]
    doubt = f"{UNSURE[0]}: {node.doubt or 'not probed'}" if node.python is None else ""
    lines.append(_set("python", node.python or PYTHON_GUESS, doubt))
    if node.ips:
        lines.append(_set("ips", list(node.ips)))
    if node.rdma is not None:
        # TOML has no null: an empty string is the node itself.
        lines.append(_set("rdma", [device or "" for device in node.rdma]))
    return lines


def _job(job: DraftJob, ranks: int) -> list[str]:
    lines = ["[job]"]
    if job.config is not None:
        lines.append(_set("config", job.config, "an mlx-lm YAML; keys in this file have priority"))
    settings = dict(job.settings)
    paths = {
        "model": (MODEL_GUESS, job.has_model, _MODEL_HERE),
        "data": (job.data or DATA_GUESS, job.has_data, _DATA_HERE),
    }
    for key, (guess, in_yaml, what) in paths.items():
        value = settings.pop(key, None) or (job.data if key == "data" else None)
        if value is not None:
            lines.append(_set(key, value, "" if key == "data" and job.push else "on every node"))
        elif not in_yaml:
            lines.append(_set(key, guess, f"{UNSURE[1]}: {what}"))
    if job.config is None:
        settings = {"fine_tune_type": "lora", "batch_size": usual_batch(ranks), "iters": USUAL_ITERS} | settings
    lines += [_set(key, value, _COMMENTS.get(key, "")) for key, value in settings.items()]
    if job.env:
        lines.append(_set("env", dict(job.env)))
    lines += [
        "# Any key of an mlx-lm training YAML is accepted here. Or replace the job by a custom command:",
        '# command = ["python", "my_script.py"]',
    ]
    return lines


USUAL_ITERS: Final = 1000


def usual_batch(ranks: int) -> int:
    """At least 8 sequences, as many on each rank."""
    return ranks * math.ceil(8 / ranks)


_COMMENTS = {"fine_tune_type": "lora, dora or full", "batch_size": "over all ranks, as in mlx-lm"}
_MODEL_HERE = "a directory in mlx-lm's format, on every node"
_DATA_HERE = "train.jsonl, valid.jsonl; on every node"


def _set(key: str, value: object, comment: str = "") -> str:
    return _commented(f"{key} = {toml_value(value)}", comment)


def toml_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_value(inner)}" for name, inner in value.items()) + "}"
    # JSON strings are TOML strings, except that TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _commented(code: str, comment: str) -> str:
    comment = sanitise(comment.encode(errors="replace"), _COMMENT_WIDTH).strip()
    return f"{code:<{_COMMENT_COLUMN - 1}} # {comment}" if comment else code


DATA, TRAIN = "data", "train.jsonl"
_TYPICAL_KEYS = frozenset(
    {"model", "data", "iters", "batch_size", "learning_rate", "fine_tune_type", "lora_parameters"}
)
"""A YAML with two of these and no unknown key is mlx-lm's."""


def find_job(folder: Path, *, remote: bool) -> DraftJob:
    """The job in `folder`; its data is sent to `remote` nodes at launch."""
    name, keys = find_yaml(folder)
    data = DATA if not keys.get("data") and (folder / DATA / TRAIN).is_file() else None
    has_model, has_data = bool(keys.get("model")), bool(keys.get("data"))
    return DraftJob(data=data, config=name, has_model=has_model, has_data=has_data, push=remote and data is not None)


def is_beside(data: str | None, folder: Path) -> bool:
    """It is a file or folder of this machine's, named from the configuration's folder."""
    if data is None or data.startswith(("/", "~", DATA_PREFIX)):
        return False
    # A name may be longer than a path can be.
    with contextlib.suppress(OSError):
        return (folder / data).exists()
    return False


def find_yaml(folder: Path) -> tuple[str | None, dict[object, object]]:
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])[:50]:
        try:
            keys = read_yaml(path)
        except DocumentError:
            continue
        if len(_TYPICAL_KEYS & keys.keys()) >= 2 and keys.keys() <= KEYS.keys() and path_form(path.name) is None:
            return path.name, keys
    return None, {}
