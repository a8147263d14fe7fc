"""Unpickles only what PyTorch puts into its checkpoints and sends between ranks. A pickle of anybody else's could run
any command when it is loaded, and the manifest that vouches for it lies beside it."""

from __future__ import annotations

import dataclasses
import enum
import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from engine.protocol.safetensors import CheckpointError

_CHECKPOINTS = "torch.distributed.checkpoint."
_OTHERS = {
    *((module, name) for module, name in (("builtins", "set"), ("builtins", "frozenset"), ("builtins", "slice"))),
    *(("traceback", "StackSummary"), ("traceback", "FrameSummary"), ("collections", "OrderedDict")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
}


class RestrictedUnpickler(pickle.Unpickler):
    """Knows plain values, dtypes, errors, and the data classes of torch.distributed.checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        # What has been imported, and nothing else: an import runs code, too.
        named = getattr(sys.modules.get(module), name, None)
        if (module, name) in _OTHERS or isinstance(named, torch.dtype):
            return named
        if isinstance(named, type) and named.__module__ == module:
            data = dataclasses.is_dataclass(named) or issubclass(named, enum.Enum)
            if issubclass(named, BaseException) or (data and module.startswith(_CHECKPOINTS)):
                return named
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of ours has")


def load_restricted(path: Path) -> Any:
    """Raises CheckpointError."""
    try:
        return RestrictedUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # whatever a damaged pickle raises
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def restrict_unpickling() -> None:
    """In this process, before it has a group, for messages between ranks and for torch.load, of all libraries."""
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    distributed_c10d._unpickler = RestrictedUnpickler
