"""Examples tokenised for PyTorch as mlx-lm (mlx_lm/tuner/datasets.py and tokenizer_utils.py) does it, token by token:
text, prompt and completion, or chat; and batches as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from engine.protocol.job import Job, JobError
from engine.protocol.jsonl import THINKING, form_of
from engine.training.data import Batch, RowFormat, Tokens
from engine.training.reporting import first_line


def load_tokenizer(job: Job) -> Any:
    """Raises JobError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            job.model, local_files_only=True, trust_remote_code=job.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise JobError(f"the tokenizer in {job.model} cannot be loaded: {first_line(error)}") from error
    if "chat_template_type" in tokenizer.init_kwargs:
        raise JobError(f"the tokenizer in {job.model} has a chat_template_type, which only mlx-lm can render")
    return tokenizer


def row_format(job: Job, tokenizer: Any) -> RowFormat:
    vocabulary = tokenizer.get_vocab()
    thinking = any(begin in vocabulary and end in vocabulary for begin, end in THINKING)

    def render(messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> list[int]:
        tokens: list[int] = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, return_dict=False, enable_thinking=thinking
        )
        return tokens

    def chat(messages: list[dict[str, Any]], tools: Any) -> Tokens:
        tokens = render(messages, tools)
        if not job.mask_prompt:
            return tokens, 0
        prompt = messages[-1].get("role") == "assistant"
        return tokens, len(render(messages[:-1], tools, prompt=prompt))

    def tokenise_completion(row: dict[str, Any]) -> Tokens:
        asked = {"role": "user", "content": row[job.prompt_feature]}
        return chat([asked, {"role": "assistant", "content": row[job.completion_feature]}], row.get("tools"))

    def tokenise_chat(row: dict[str, Any]) -> Tokens:
        return chat(row[job.chat_feature], row.get("tools"))

    def tokenise_text(row: dict[str, Any]) -> Tokens:
        tokens = tokenizer.encode(row[job.text_feature])
        if tokens[-1] != tokenizer.eos_token_id:
            tokens.append(tokenizer.eos_token_id)
        return tokens, 0

    def choose(first: dict[str, Any]) -> Callable[[dict[str, Any]], Tokens]:
        form = form_of(first, job.features)
        if form == "text" and job.mask_prompt:
            raise ValueError("Prompt masking not supported for text dataset.")
        return {"completions": tokenise_completion, "chat": tokenise_chat, "text": tokenise_text}[str(form)]

    return choose


EMPTY = Batch(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32), 0)
"""For a rank without examples, which takes part in every forward pass of a partitioned model all the same."""


def loss_sum(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """The sum of the targets' cross-entropies, a float32 scalar."""
    tokens = torch.from_numpy(batch.tokens).to(device, torch.int64)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    position = np.arange(1, batch.tokens.shape[1])
    mask = (position >= batch.bounds[:, :1]) & (position < batch.bounds[:, 1:])
    # Their numbers are known here: a mask on a GPU would have the program wait for it, to count them.
    targets = torch.from_numpy(np.flatnonzero(mask)).to(device)
    # Only the targets' logits are made float32.
    chosen = logits.flatten(0, 1).index_select(0, targets).float()
    return torch.nn.functional.cross_entropy(chosen, tokens[:, 1:].flatten()[targets], reduction="sum")
