"""On the path of a rank's python (tests put it there): flips one bit of one parameter of one rank, once.

CORRUPT = "rank update part": after that rank's that-many-th update, in its first "trained" or "frozen" parameter; as
"nan", the first trained one is no number any more. It
waits for the trainer's optimizer to be imported and goes round its `update`; the trainer itself knows nothing of it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

RANK, UPDATE, PART = (os.environ.get("CORRUPT") or "-1 0 trained").split()
MODULE = "engine.trainer.optimizer"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        spec.loader = Loader(name, spec.loader.path)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        original, updates = module.Updater.update, [0]

        def update(self: Any, *arguments: Any) -> Any:
            norm = original(self, *arguments)
            updates[0] += 1
            if updates[0] == int(UPDATE):
                corrupt(self)
            return norm

        module.Updater.update = update


def corrupt(updater: Any) -> None:
    """Flip a low bit of an element in the middle; the next update could round away the lowest."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    model = updater._model
    if PART != "frozen":
        name, value = next(iter(updater.masters.items()))
    else:
        trained = dict(tree_flatten(model.trainable_parameters()))
        name, value = next(entry for entry in tree_flatten(model.parameters()) if entry[0] not in trained)
    bits = value.reshape(-1).view(mx.uint32)
    place = mx.arange(bits.size) == bits.size // 2
    flipped = mx.where(place, bits ^ 256, bits).view(value.dtype).reshape(value.shape)
    if PART == "nan":
        flipped = mx.full(value.shape, float("nan"), value.dtype)
    mx.eval(flipped)
    if PART != "frozen":
        updater.masters[name] = flipped
    model.update(tree_unflatten([(name, flipped)]), strict=False)


if os.environ.get("MLX_RANK") == RANK:
    sys.meta_path.insert(0, Finder())
