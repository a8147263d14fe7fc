"""The `adapters` and `reporters` probes: a model that mlx-lm cannot adapt, and services that cannot be reported to, for
which a rank would end after it has loaded its model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_QUIET = ("offline", "disabled", "dryrun", "local")
_KEY_FILES = {"wandb": ("api.wandb.ai", "~/.netrc", "~/_netrc"), "swanlab": ("swanlab", "~/.swanlab/.netrc")}
"""Service → its host, and the files in which its login keeps the key."""


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
