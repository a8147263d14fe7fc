"""The `template`, `adapters` and `reporters` probes: rows that the chat template refuses, a model that mlx-lm cannot
adapt, and services that cannot be reported to, for which a rank would end after it has loaded its model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.node.probes.dataset import form_of

_OUTLINES = 2_000
"""Most kinds of rows per file that are tried: each takes about a millisecond."""
_READ_S = 10.0
"""Longest time to read one file: 40,000 rows of six messages on a busy machine."""
_REFUSED = 20
_KEPT = ("role", "type")
"""Keys whose values a template decides by."""
_QUIET = ("offline", "disabled", "dryrun", "local")
_KEY_FILES = {"wandb": ("api.wandb.ai", "~/.netrc", "~/_netrc"), "swanlab": ("swanlab", "~/.swanlab/.netrc")}
"""Service → its host, and the files in which its login keeps the key."""


def outline(value: Any, key: str = "") -> Any:
    """The value without its texts: rows of equal outlines are the same to a template."""
    if isinstance(value, dict):
        return {name: outline(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [outline(each) for each in value]
    if isinstance(value, str):
        return value if key in _KEPT else bool(value.strip())
    return type(value).__name__


def kinds_of_rows(path: Path, keys: Mapping[str, Any]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(line number from 1, number of rows, the first row) for each outline, as far as _READ_S goes; none where the file
    is not rendered by a template. Lines that cannot be read are left out."""
    found: dict[str, list[Any]] = {}
    form: str | None = None
    until = time.monotonic() + _READ_S
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                form = form or form_of(row, dict(keys))
                shape = json.dumps(outline(row), sort_keys=True)
            except (ValueError, TypeError, RecursionError):
                continue
            if form == "text":
                return
            if time.monotonic() > until:
                break
            if shape in found:
                found[shape][1] += 1
            elif len(found) < _OUTLINES:
                found[shape] = [number, 1, row]
    for line, count, row in found.values():
        yield line, count, row


def probe_template(model: str, settings: str, *files: str) -> dict[str, Any]:
    """`refused`: for each file and reason `file`, `line`, `count`, `why`; `problem` if the rows could not be tried.
    `settings` is JSON: {"prompt": …, "completion": …, "chat": …, "text": …, "mask_prompt": …, "trust_remote_code": …}.
    mlx-lm's own code renders the rows, as it does for a rank; with "framework": "torch" transformers'."""
    keys = json.loads(settings)
    try:
        rows = [(file, *kind) for file in files if Path(file).is_file() for kind in kinds_of_rows(Path(file), keys)]
        # Libraries print; the report is the only thing on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            return {"refused": _refused(model, keys, rows) if rows else []}
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def _refused(model: str, keys: Mapping[str, Any], rows: list[tuple[str, int, int, Any]]) -> list[dict[str, Any]]:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    process = (_transformers if keys.get("framework") == "torch" else _mlx_lm)(model, keys)
    refused: dict[tuple[str, str], dict[str, Any]] = {}
    for file, line, count, row in rows:
        try:
            process(row)
        except Exception as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            entry = refused.setdefault((file, why), {"file": file, "line": line, "count": 0, "why": why})
            entry["count"] += count
    return list(refused.values())[:_REFUSED]


def _transformers(model: str, keys: Mapping[str, Any]) -> Callable[[dict[str, Any]], object]:
    """The tokens of one row, as engine.torch_trainer.data makes them."""
    load = importlib.import_module("transformers").AutoTokenizer.from_pretrained
    tokenizer = load(model, local_files_only=True, trust_remote_code=keys["trust_remote_code"])

    def process(row: dict[str, Any]) -> object:
        messages: Any = row.get(keys["chat"])
        if keys["prompt"] in row and keys["completion"] in row:
            pair = (("user", row[keys["prompt"]]), ("assistant", row[keys["completion"]]))
            messages = [{"role": role, "content": content} for role, content in pair]
        render = tokenizer.apply_chat_template
        if keys["mask_prompt"]:
            render(messages[:-1], tools=row.get("tools"), add_generation_prompt=messages[-1].get("role") == "assistant")
        return render(messages, tools=row.get("tools"))

    return process


def _mlx_lm(model: str, keys: Mapping[str, Any]) -> Callable[[dict[str, Any]], object]:
    load = importlib.import_module("mlx_lm.utils").load_tokenizer
    create_dataset = importlib.import_module("mlx_lm.tuner.datasets").create_dataset
    tokenizer = load(Path(model), {"trust_remote_code": keys["trust_remote_code"]})
    features = {f"{name}_feature": keys[name] for name in ("prompt", "completion", "chat", "text")}
    job = types.SimpleNamespace(mask_prompt=keys["mask_prompt"], **features)
    return lambda row: create_dataset([row], tokenizer, job).process(row)


def probe_adapters(model: str, settings: str) -> dict[str, Any]:
    """`trained`, how many tensors would be; `names` of the last layer's matrices; `problem` if mlx-lm cannot adapt it;
    `untried` if that is not known. `settings` is JSON: {"num_layers": …, "lora_parameters": …, "dora": …}. The model is
    built from its config.json, but no weight is read or computed."""
    asked = json.loads(settings)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            utils = importlib.import_module("mlx_lm.utils")
            config = utils.load_config(Path(model))
            kind, arguments = utils._get_classes(config)
            built = kind(arguments.from_dict(config))
            names = [name for name, part in built.layers[-1].named_modules() if hasattr(part, "to_quantized")]
            built.freeze()
            adapt = importlib.import_module("mlx_lm.tuner.utils").linear_to_lora_layers
            try:
                adapt(built, asked["num_layers"], asked["lora_parameters"], use_dora=asked["dora"])
            except (KeyError, TypeError, ValueError) as error:
                return {"names": names, "problem": str(error)}
            trained = importlib.import_module("mlx.utils").tree_flatten(built.trainable_parameters())
            return {"names": names, "trained": len(trained)}
    except Exception as error:
        return {"untried": f"{type(error).__name__}: {error}"}


def needs_key(service: str, environment: Mapping[str, str]) -> bool:
    """False if these variables hold a key for the service, or a mode in which it sends nothing, or name a server of
    one's own, whose keys cannot be told from others."""
    prefix = service.upper()
    if environment.get(f"{prefix}_BASE_URL") or environment.get(f"{prefix}_API_HOST"):
        return False
    return not environment.get(f"{prefix}_API_KEY") and environment.get(f"{prefix}_MODE", "").lower() not in _QUIET


def probe_reporters(*services: str) -> dict[str, Any]:
    """`services`: name → `installed`, and whether there is a `key` on this node (or none is needed)."""
    return {"services": {name: {"installed": _installed(name), "key": _has_key(name)} for name in services}}


def _installed(name: str) -> bool:
    # A folder of the same name, as W&B leaves one, has no origin.
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def _has_key(service: str) -> bool:
    if not needs_key(service, os.environ):
        return True
    host, *files = _KEY_FILES[service]
    for file in (os.environ.get("NETRC", files[0]), *files[1:]):
        with contextlib.suppress(OSError, ValueError):
            if host in Path(file).expanduser().read_text():
                return True
    return False
