"""A folder of trained weights on this machine: what it holds, read from its files alone, and its copy without the paths
of a machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.node.probes.model_files import sha256
from engine.protocol.attempt import read_regular
from engine.protocol.safetensors import CheckpointError, check_header
from engine.security.sanitise import json_object, json_or_none

ADAPTERS = {"adapters.safetensors": "mlx", "adapter_model.safetensors": "peft"}
_ADAPTER_CONFIG = "adapter_config.json"
_CONFIGURATIONS = ("config.json", "generation_config.json", "tokenizer_config.json", _ADAPTER_CONFIG)
_OF_MODEL = {".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
_MLX_KEYS = ("fine_tune_type", "num_layers", "lora_parameters")
"""All that mlx-lm's load_adapters reads."""
_PATH = re.compile(r"(?:/|~/)[^/\s]+/")


@dataclass(frozen=True)
class ModelFolder:
    path: Path
    holds: str
    """"adapter", "weights" (those of the layers that full fine-tuning has trained) or "model"."""
    library: str
    """That loads it: "mlx", "peft" or "transformers"."""
    config: Mapping[str, Any]
    """config.json, or an adapter's adapter_config.json."""
    tensors: tuple[str, ...]
    files: tuple[str, ...]
    """Those that are published; what else lies there is not."""

    @property
    def architecture(self) -> str | None:
        return next(iter(self.config.get("architectures") or ()), None)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file of weights. Raises OSError."""
        return {name: sha256(self.path / name) for name in self.files if name.endswith(".safetensors")}

    def copy(self, target: Path, base: str, place: Callable[[Path, Path], object]) -> None:
        """Have its files in the folder `target`: configurations without paths of a machine, the others by `place`, from
        one path to another. `base`: the name of an adapter's base model. Raises OSError."""
        for name in self.files:
            if name not in _CONFIGURATIONS:
                place((self.path / name).resolve(), target / name)
                continue
            document = read_document(self.path / name)
            if name == _ADAPTER_CONFIG and self.library == "mlx":
                document = {key: document.get(key) for key in _MLX_KEYS} | {"model": base}
            elif name == _ADAPTER_CONFIG:
                document["base_model_name_or_path"] = base
            document = json.loads(json.dumps(document), object_hook=_without_paths)
            (target / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_folder(path: Path) -> ModelFolder:
    """Raises InputError for a folder with neither an adapter nor a whole model, or a damaged one."""
    try:
        files = sorted(entry.name for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
        weights = next(([name] for name in ADAPTERS if {name, _ADAPTER_CONFIG} <= {*files}), None)
        if adapter := weights is not None:
            files, library, config = [*weights, _ADAPTER_CONFIG], ADAPTERS[weights[0]], _ADAPTER_CONFIG
        else:
            weights, config = [name for name in files if name.endswith(".safetensors")], "config.json"
            index = read_document(path / "model.safetensors.index.json").get("weight_map") or {}
            if missing := sorted({config, *index.values()}.difference(files)) or ["weights"] * (not weights):
                why = f"it has neither an adapter and its {_ADAPTER_CONFIG} nor a whole model ({missing[0]})"
                raise InputError("nothing to publish", where=str(path), why=why, todo="give the folder of either")
            files = [name for name in files if Path(name).suffix in _OF_MODEL]
        headers = [check_header(path / name) for name in weights]
    except (OSError, CheckpointError) as error:
        reason = error if isinstance(error, OSError) else str(error)
        raise InputError("the weights cannot be read", where=str(path), why=reason, todo="fetch them again") from error
    document, tensors = read_document(path / config), tuple(name for header in headers for name in header.tensors)
    holds = ("weights" if document.get("fine_tune_type") == "full" else "adapter") if adapter else "model"
    if not adapter:
        library = "transformers" if headers[0].metadata.get("format") == "pt" else "mlx"
    return ModelFolder(path, holds, library, document, tensors, tuple(files))


def read_document(path: Path) -> dict[str, Any]:
    try:
        return json_object(json_or_none(read_regular(path)))
    except OSError:
        return {}


def _without_paths(document: dict[str, Any]) -> dict[str, Any]:
    """An object of JSON without values that are paths of a machine: they name its users."""
    return {key: value for key, value in document.items() if not (isinstance(value, str) and _PATH.match(value))}
