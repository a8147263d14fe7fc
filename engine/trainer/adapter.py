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
        self.detach()

    def detach(self) -> None:
        """Compute as the base model, unless the trained weights are fused or those of a full fine-tuning."""
        self._put(self._bases)

    def attach(self) -> None:
        self._put(self._layers)

    def load(self, parts: Iterable[Mapping[str, mx.array]], *, fuse: bool) -> None:
        """Attach the trained weights, of which this rank takes its own. `fuse`: into those of the base where they are
        not quantized, which would round them; at most one layer is in memory twice."""
        self.attach()
        names = {name for name, _ in tree_flatten(self.part.parameters())}
        for tensors in parts:
            mine = {name: value for name, value in tensors.items() if name in names}
            mx.eval(mine)
            self.part.load_weights(list(mine.items()), strict=False)
        for name in [name for name, base in self._bases.items() if fuse and not hasattr(base, "bits")]:
            fused = self._layers.pop(name).fuse()
            del self._bases[name]
            mx.eval(fused.parameters())
            self._put({name: fused})

    def evaluate(self) -> None:
        """Load the part's weights, one after the other."""
        for _, value in tree_flatten(self.part.parameters()):
            mx.eval(value)

    def _put(self, modules: Mapping[str, nn.Module]) -> None:
        self.part.update_modules(tree_unflatten(list(modules.items())))
