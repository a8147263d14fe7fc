"""Examples as mlx-lm tokenises them: text, prompt and completion, or chat."""

from __future__ import annotations

from typing import Any

from mlx_lm.tuner.datasets import create_dataset

from engine.protocol.job import Job
from engine.training.data import RowFormat


def row_format(job: Job, tokenizer: Any) -> RowFormat:
    return lambda first: create_dataset([first], tokenizer, job).process
