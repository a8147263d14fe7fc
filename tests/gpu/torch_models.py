"""Make Llamas with random weights and a tokenizer that has a token for each character: run by the nodes' python.

    python -m tests.gpu.torch_models DEVICE '{"FOLDER": CONFIG, …}'

CONFIG is a config.json. The weights are made on DEVICE, in the config's dtype. Nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

END, PAD = "<|end|>", "<|pad|>"


def write_tokenizer(folder: Path) -> None:
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END, PAD]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def write_weights(folder: Path, config: dict[str, Any], device: str) -> None:
    torch.manual_seed(7)
    torch.set_default_dtype(getattr(torch, config["dtype"]))
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**config))
    model.save_pretrained(folder)


if __name__ == "__main__":
    for name, values in json.loads(sys.argv[2]).items():
        Path(name).mkdir(parents=True)
        write_tokenizer(Path(name))
        write_weights(Path(name), values, sys.argv[1])
