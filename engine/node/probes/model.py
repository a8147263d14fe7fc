"""The `model` and `configuration` probes: what lies in a model directory. Nothing of it is loaded."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from engine.node.probes import did_you_mean, reason_of
from engine.protocol.safetensors import CheckpointError, check_header

CONFIGURATION = "config.json"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
HASHED = (CONFIGURATION, INDEX, *TOKENIZER_FILES)
HASHED_LIMIT = 256 << 20
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def probe_model(path: str) -> dict[str, Any]:
    """`kind` (model_type), `bytes`, `shards`, `faults`, `repository` (ORG/NAME that config.json names), `quantized` (by
    MLX) and `hashes`: SHA-256 of the small files that decide what is trained, and the sizes of the shards."""
    directory = Path(path)
    report: dict[str, Any] = {"kind": "?", "bytes": 0, "shards": 0, "faults": [], "repository": None, "hashes": {}}
    if not directory.is_dir():
        report["faults"] = [f"no such directory{did_you_mean(directory, CONFIGURATION)}"]
        return report
    faults: list[str] = report["faults"]
    try:
        configuration = json.loads((directory / CONFIGURATION).read_bytes())
        report["kind"] = str(configuration["model_type"])
        name = configuration.get("_name_or_path")
        report["quantized"] = isinstance(configuration.get("quantization"), dict)
        report["repository"] = name if isinstance(name, str) and _REPOSITORY.fullmatch(name) else None
    except FileNotFoundError:
        faults.append("config.json is missing")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        faults.append("config.json is no model configuration (JSON with a model_type)")
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        faults.append("no tokenizer (tokenizer.json or tokenizer.model)")
    shards = sorted(directory.glob("model*.safetensors"))
    faults += _shard_faults(directory, {shard.name for shard in shards})
    report["shards"], report["bytes"] = len(shards), sum(shard.stat().st_size for shard in shards)
    report["hashes"] = {name: value for name in HASHED if (value := file_hash(directory / name)) is not None}
    report["hashes"] |= {shard.name: f"{shard.stat().st_size} bytes" for shard in shards}
    return report


def _shard_faults(directory: Path, present: set[str]) -> list[str]:
    index = directory / INDEX
    if index.is_file():
        try:
            named = {str(file) for file in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return [f"{index.name} has no weight_map"]
        missing = sorted(named - present)
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            return [f"{len(missing)} of {len(named)} shards missing: {shown}"]
    if not present:
        return ["no weights (model*.safetensors)"]
    empty = sorted(name for name in present if (directory / name).stat().st_size <= 8)
    return [f"empty: {', '.join(empty)}"] if empty else []


def file_hash(path: Path) -> str | None:
    """SHA-256 of the file, its size if over the limit, or why it cannot be read; None if it is missing."""
    try:
        size = path.stat().st_size
        return f"{size} bytes" if size > HASHED_LIMIT else sha256(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        return reason_of(error, path)


def sha256(path: Path) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


LIMIT_BYTES = 256 << 10
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def probe_configuration(directory: str) -> dict[str, Any]:
    """The model's config.json as `configuration`, or `problem`; `dtype`, in which most of its unquantized weights are
    stored, where their safetensors files have readable headers: mlx-lm trains in that type, whatever config.json says.
    """
    path = Path(directory) / CONFIGURATION
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        return {"problem": f"{path}: {reason_of(error, path)}{did_you_mean(path.parent, CONFIGURATION)}"}
    if len(content) > LIMIT_BYTES:
        return {"problem": f"{path} is no model configuration: more than {LIMIT_BYTES >> 10} KiB"}
    try:
        configuration = json.loads(content)
    except (ValueError, RecursionError):
        configuration = None
    if not isinstance(configuration, dict):
        return {"problem": f"{path} is no model configuration: no JSON object"}
    return {"configuration": configuration, "dtype": _stored_dtype(path.parent)}


def _stored_dtype(directory: Path) -> str | None:
    elements: Counter[str] = Counter()
    try:
        for shard in sorted(directory.glob("model*.safetensors")):
            for dtype, shape in check_header(shard).tensors.values():
                if dtype in _DTYPES:
                    elements[_DTYPES[dtype]] += prod(shape)
    except (OSError, CheckpointError):
        return None
    return max(elements, key=elements.__getitem__, default=None)
