"""A run's trained weights in a part of the model: fused into the base, as layers beside it, or left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten


class Adapter:
    """The trained layers of `part`, which is the base model until `load`."""

    def __init__(self, part: nn.Module) -> None:
        """`part`: with the job's layers of LoRA or DoRA, not evaluated."""
        self.part = part
        self._layers = {name: module for name, module in part.named_modules() if "lora_a" in module}
        self._bases = {name: layer.get("linear", layer.get("embedding")) for name, layer in self._layers.items()}
        self._trained: dict[str, mx.array] = {}
        self._replaced: dict[str, mx.array] = {}
        """A full fine-tuning's weights, and the base's in their place; none where they are not kept."""
        self.detach()

    def detach(self) -> None:
        """Compute as the base model, unless its weights are fused, or replaced and not kept."""
        self._put(self._bases)
        self.part.load_weights(list(self._replaced.items()), strict=False)

    def attach(self) -> None:
        self._put(self._layers)
        self.part.load_weights(list(self._trained.items()), strict=False)

    def load(self, parts: Iterable[Mapping[str, mx.array]], *, fuse: bool, keep_base: bool = False) -> None:
        """Attach the trained weights, of which this rank takes its own. `fuse`: into those of the base where they are
        not quantized, which would round them; at most one layer is in memory twice. `keep_base`: keep the weights that
        a full fine-tuning replaces, so that it can be detached."""
        self.attach()
        for tensors in parts:
            base = dict(tree_flatten(self.part.parameters()))
            # A state has float32 masters.
            mine = {name: value.astype(base[name].dtype) for name, value in tensors.items() if name in base}
            mx.eval(mine)
            self.part.load_weights(list(mine.items()), strict=False)
            if keep_base and not self._layers:
                self._trained.update(mine)
                self._replaced.update({name: base[name] for name in mine})
        for name in [name for name, base in self._bases.items() if fuse and not hasattr(base, "bits")]:
            fused, base = self._layers.pop(name).fuse(), self._bases.pop(name)
            # mlx-lm's `fuse` of DoRA gives float32.
            fused.weight = fused.weight.astype(base.weight.dtype)
            mx.eval(fused.parameters())
            self._put({name: fused})

    def evaluate(self) -> None:
        """Load the part's weights, one after the other."""
        for _, value in tree_flatten(self.part.parameters()):
            mx.eval(value)

    def _put(self, modules: Mapping[str, nn.Module]) -> None:
        self.part.update_modules(tree_unflatten(list(modules.items())))
