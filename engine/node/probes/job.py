"""The `loading`, `adapters` and `reporters` probes: a model that cannot be loaded or that mlx-lm cannot adapt, and
services that cannot be reported to, for all of which a rank would end."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import json
import os
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.node.probes.storage import shapes
from engine.protocol.safetensors import misfit

_QUIET = ("offline", "disabled", "dryrun", "local")
_KEY_FILES = {"wandb": ("api.wandb.ai", "~/.netrc", "~/_netrc"), "swanlab": ("swanlab", "~/.swanlab/.netrc")}
"""Service → its host, and the files in which its login keeps the key."""


def probe_adapters(model: str, settings: str) -> dict[str, Any]:
    """`settings` is JSON: {"num_layers": …, "lora_parameters": …, "kind": …, "resume": a file of weights or null}; the
    answer an AdapterReport of the head's. The model is built from its config.json, and no weight is read."""
    asked = json.loads(settings)
    try:
        utils = importlib.import_module("mlx_lm.utils")
        config = utils.load_config(Path(model))
        kind, arguments = utils._get_classes(config)
        built = kind(arguments.from_dict(config))
        names = [name for name, part in built.layers[-1].named_modules() if hasattr(part, "to_quantized")]
        built.freeze()
        layers = built.layers[-max(asked["num_layers"], 0) :]
        paths = {path for part in (built, *layers) for path, _ in part.named_modules()}
        report: dict[str, Any] = {
            "names": names,
            "unmatched": sorted({*(asked["lora_parameters"].get("keys") or ())} - paths),
        }
        adapt = importlib.import_module("mlx_lm.tuner.utils").linear_to_lora_layers
        try:
            if asked["kind"] == "full":
                for layer in layers:
                    layer.unfreeze()
            else:
                adapt(built, asked["num_layers"], asked["lora_parameters"], use_dora=asked["kind"] == "dora")
        except (KeyError, TypeError, ValueError) as error:
            return {**report, "problem": str(error)}
        flat = importlib.import_module("mlx.utils").tree_flatten
        trained = {name for name, _ in flat(built.trainable_parameters())}
        report["trained"] = len(trained)
        if asked["resume"] is not None:
            saved = shapes(Path(asked["resume"]).expanduser())
            parameters = {name: value.shape for name, value in flat(built.parameters())}
            report |= {"misfit": misfit(saved, parameters, trained), "lacking": len(trained - saved.keys())}
        return report
    except Exception as error:
        return {"untried": f"{type(error).__name__}: {error}"}


def probe_loading(model: str, framework: str) -> dict[str, Any]:
    """`loads` if the framework's own code reads the model, of which nothing is computed, and its tokenizer; `problem`
    if not, `own_code` if that wants code in the model's folder, which is not run; `untried` without the framework."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    library: Any = None
    try:
        library = importlib.import_module("transformers" if framework == "torch" else "mlx_lm.utils")
        if framework == "torch":
            for part in (library.AutoConfig, library.AutoTokenizer):
                part.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        else:
            library.load_model(Path(model), lazy=True)
            library.load_tokenizer(Path(model), {"trust_remote_code": False})
    except Exception as error:
        if library is None:
            return {"untried": f"{type(error).__name__}: {error}"}
        if "trust_remote_code" in str(error):
            return {"own_code": True}
        absent = getattr(error.__cause__, "name", None) or ""
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if absent.startswith("mlx_lm.models."):
            names = [module.name for module in pkgutil.iter_modules(importlib.import_module("mlx_lm.models").__path__)]
            close = difflib.get_close_matches(absent.rpartition(".")[2].lower(), names, n=1, cutoff=0.8)
            problem += f" Did you mean {close[0]}?" if close else ""
        return {"problem": problem}
    return {"loads": True}


def needs_key(service: str, environment: Mapping[str, str]) -> bool:
    """False if these variables hold a key for the service, or a mode in which it sends nothing, or name a server of
    one's own, whose keys cannot be told from others."""
    prefix = service.upper()
    if environment.get(f"{prefix}_BASE_URL") or environment.get(f"{prefix}_API_HOST"):
        return False
    return not environment.get(f"{prefix}_API_KEY") and environment.get(f"{prefix}_MODE", "").lower() not in _QUIET


def probe_reporters(*services: str) -> dict[str, Any]:
    """`services`: name → `installed`, and whether there is a `key` on this node (or none is needed)."""
    # A folder of the same name, as W&B leaves one, has no origin.
    installed = {name: getattr(importlib.util.find_spec(name), "origin", None) is not None for name in services}
    return {"services": {name: {"installed": installed[name], "key": _has_key(name)} for name in services}}


def _has_key(service: str) -> bool:
    if not needs_key(service, os.environ):
        return True
    host, *files = _KEY_FILES[service]
    for file in (os.environ.get("NETRC", files[0]), *files[1:]):
        with contextlib.suppress(OSError, ValueError):
            if host in Path(file).expanduser().read_text():
                return True
    return False
