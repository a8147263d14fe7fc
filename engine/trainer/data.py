"""Examples as mlx-lm tokenises them: text, prompt and completion, or chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.tuner.datasets import create_dataset

from engine.protocol.job import Job
from engine.training.data import RowFormat, Tokens


def row_format(job: Job, tokenizer: Any) -> RowFormat:
    def choose(first: dict[str, Any]) -> Callable[[dict[str, Any]], Tokens]:
        tokenise: Callable[[dict[str, Any]], Tokens] = create_dataset([first], tokenizer, job).process
        return tokenise

    return choose
