"""Models with random weights, and examples of one length, for benchmarks that compare trainers on them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer

from engine.demo_model import calls


def write_llama(directory: Path, demo: Path, sizes: Mapping[str, int], dtype: str) -> int:
    """Random weights of a Llama with the tokenizer of the model in `demo`; its number of parameters."""
    directory.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_bytes((demo / file).read_bytes())
    config = json.loads((demo / "config.json").read_text()) | dict(sizes) | {"torch_dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config))
    mx.random.seed(3)
    model = Model(ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, dtype))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return sum(value.size for value in weights.values())


def write_equal_data(directory: Path, model: Path, tokens: int, examples: int) -> None:
    """Examples of exactly so many tokens each, the end of text included."""
    directory.mkdir()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    radio = calls(random.Random(7))
    for split, count in {"train": examples, "valid": examples}.items():
        rows = [json.dumps({"text": _text(tokenizer, radio, tokens - 1)}) + "\n" for _ in range(count)]
        (directory / f"{split}.jsonl").write_text("".join(rows))


def _text(tokenizer: Tokenizer, radio: Iterator[str], tokens: int) -> str:
    """A text of exactly so many tokens."""
    text, shortest = "", 0
    while True:
        text += next(radio)
        if len(text) < shortest:
            continue
        encoded = tokenizer.encode(text)
        # Characters without which it is not worth encoding again.
        shortest = int(0.9 * len(text) * tokens / len(encoded.ids))
        # Cut after a token, a text is mostly encoded as the same tokens again, but not always.
        for _, end in encoded.offsets[tokens - 1 :]:
            if len(tokenizer.encode(text[:end]).ids) == tokens:
                return text[:end]
