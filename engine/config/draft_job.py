"""What a folder tells about the job to draft: an mlx-lm YAML or data that lie there."""

from __future__ import annotations

from pathlib import Path

from engine.config.documents import DocumentError, read_yaml
from engine.config.draft import DraftJob
from engine.config.mlx_lm_keys import KEYS
from engine.config.places import path_form

DATA, TRAIN = "data", "train.jsonl"
_SIGNS = frozenset({"model", "data", "iters", "batch_size", "learning_rate", "fine_tune_type", "lora_parameters"})
"""A YAML with two of these and no foreign key is mlx-lm's."""


def find_job(folder: Path, *, remote: bool) -> DraftJob:
    """The job of a configuration in `folder`. With `remote` nodes paths are written so that they mean something on
    another machine: below the home where they lie there."""
    found = _yaml(folder)
    data = None
    if found is None or not found[1].get("data"):
        data = _data(folder, remote=remote)
    if found is None:
        return DraftJob(data=data)
    name, keys = found
    return DraftJob(data=data, config=name, has_model=bool(keys.get("model")), has_data=bool(keys.get("data")))


def _yaml(folder: Path) -> tuple[str, dict[object, object]] | None:
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])[:50]:
        try:
            keys = read_yaml(path)
        except DocumentError:
            continue
        if len(_SIGNS & set(map(str, keys))) >= 2 and all(key in KEYS for key in keys) and path_form(path.name) is None:
            return path.name, keys
    return None


def _data(folder: Path, *, remote: bool) -> str | None:
    if not (folder / DATA / TRAIN).is_file():
        return None
    if not remote:
        return DATA
    path = (folder / DATA).absolute()
    text = f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
    return text if path_form(text) is None else None
