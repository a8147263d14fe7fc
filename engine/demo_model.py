"""Makes what the demo trains: a tiny Llama with random weights, its tokenizer, and a corpus, in one directory.

Run as `python -m engine.demo_model DIRECTORY`, in a process of its own, since it imports mlx and mlx_lm, which the
console's process must never do. The same bytes come out every time: everything is seeded, nothing is downloaded."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 7
VOCABULARY = 384
"""Above the 256 bytes (so that any text can be encoded), and enough for each word of the corpus to be one token."""
END, PAD = "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
EXAMPLES = {"train": 512, "valid": 64, "test": 32}
CALLS_PER_EXAMPLE = 4

FLIGHTS = ("falcon", "heron", "kestrel", "osprey", "petrel", "plover", "raven", "tern")
MANOEUVRES = {
    "climb": "level one two zero, report reaching",
    "descend": "level six zero, report passing",
    "turn left": "heading two seven zero, report steady",
    "turn right": "heading zero nine zero, report steady",
    "hold": "over the beacon, report entering",
    "land": "runway three four, report vacated",
}


def calls(dice: random.Random) -> Iterator[str]:
    """Radio calls without end: two choices each (who, and what), all else follows from them, which a model of any
    size learns within tens of steps."""
    while True:
        flight, manoeuvre = dice.choice(FLIGHTS), dice.choice(sorted(MANOEUVRES))
        yield f"tower to {flight}: {manoeuvre} {MANOEUVRES[manoeuvre]}. {flight} copies: {manoeuvre}, over."


def write_corpus(directory: Path, dice: random.Random) -> list[str]:
    """Write train, valid and test.jsonl in mlx-lm's text form; the training texts."""
    directory.mkdir(parents=True)
    radio = calls(dice)
    texts = {}
    for split, count in EXAMPLES.items():
        texts[split] = [" ".join(next(radio) for _ in range(CALLS_PER_EXAMPLE)) for _ in range(count)]
        lines = (json.dumps({"text": text}) + "\n" for text in texts[split])
        (directory / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return texts["train"]


def write_tokenizer(directory: Path, texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE on the corpus and write it as transformers reads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": 1024,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer


def write_model(directory: Path, end: int, pad: int) -> None:
    """Write config.json and model.safetensors: float32, random."""
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float32",
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    mx.random.seed(SEED)
    model = Model(ModelArgs.from_dict(config))
    weights: dict[str, Any] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(directory / "config.json", config)


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def make(directory: Path) -> None:
    """Fill `directory` with model/ and data/."""
    texts = write_corpus(directory / "data", random.Random(SEED))
    (directory / "model").mkdir()
    tokenizer = write_tokenizer(directory / "model", texts)
    end, pad = (tokenizer.token_to_id(token) for token in (END, PAD))
    assert end is not None and pad is not None
    write_model(directory / "model", end, pad)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    make(Path(sys.argv[1]))
