"""What is measured for a job with a command of its own: a tiny Llama like the demo's, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.llama import Model, ModelArgs

from .data import Batch
from .job import Job
from .sampler import Indices

VOCABULARY = 384
LENGTH = 129
"""Tokens of each example."""
EXAMPLES = 64


class RandomTokens:
    """Examples of one length, the same on every node."""

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(7).integers(0, VOCABULARY, (EXAMPLES, LENGTH), np.int32)

    def batch(self, indices: Sequence[int] | Indices) -> Batch:
        rows = np.asarray(indices) % EXAMPLES
        bounds = np.tile(np.asarray([1, LENGTH], np.int32), (len(rows), 1))
        return Batch(self._tokens[rows], bounds, len(rows) * (LENGTH - 1))


def stand_in(batch_size: int, home: Path) -> tuple[Job, nn.Module]:
    """The job, and its model with all but embeddings, norm and head to be trained, as in mlx-lm's "full"."""
    mx.random.seed(7)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=128,
            num_hidden_layers=2,
            intermediate_size=320,
            num_attention_heads=4,
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
    )
    model.freeze()
    for layer in model.layers:
        layer.unfreeze()
    mx.eval(model.parameters())
    job = Job(home, home, home, home, fine_tune_type="full", batch_size=batch_size, max_seq_length=LENGTH)
    return job, model
