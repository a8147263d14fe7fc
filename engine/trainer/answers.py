"""Answers of a run's weights to prompts, and of the base model's. One rank has the whole model; several divide it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from engine.protocol.job import JobError, config_hash
from engine.protocol.partition import format_split
from engine.protocol.task import Task
from engine.trainer.adapter import Adapter
from engine.trainer.collective import Collective
from engine.trainer.divided_model import DividedModel
from engine.trainer.model import encode_prompt, load_tokenizer, set_up_device
from engine.trainer.variants import broadcast_tensors, build
from engine.training.data import files_checksum, rank_job
from engine.training.process import TrainingProcess
from engine.training.reporting import Outcome
from engine.training.result_tasks import VARIANTS, Conversation, GenerateOptions


@dataclass(frozen=True)
class Generator:
    """This rank's part of the model, with what it needs to answer."""

    model: Any
    """As mlx-lm calls it: the whole one, or `divided`."""
    divided: DividedModel | None
    tokenizer: Any
    adapter: Adapter
    process: TrainingProcess

    @property
    def stopping(self) -> bool:
        """On all ranks alike."""
        return self.divided.stopping if self.divided is not None else self.process.control.stop.is_set()

    def answer_all(self, variant: str, options: GenerateOptions) -> None:
        """On rank 0, while the others follow. Raises PeerLost, GroupError."""
        for prompt in options.prompts:
            if not self.stopping:
                self.answer(variant, prompt, options)
        if self.divided is not None:
            self.divided.end()

    def answer(self, variant: str, prompt: str | Conversation, options: GenerateOptions) -> None:
        """On rank 0: one answer, printed as it comes, and reported. Raises PeerLost, GroupError."""
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        self.process.reporter.print(f"{variant}: {question}")
        mx.random.seed(options.seed)
        last, pieces = None, []
        responses = stream_generate(
            self.model,
            self.tokenizer,
            encode_prompt(self.tokenizer, prompt, raw=options.raw),
            max_tokens=options.max_tokens,
            sampler=make_sampler(options.temperature, options.top_p),
        )
        with contextlib.closing(responses):
            for last in responses:
                pieces.append(last.text)
                print(last.text, end="", flush=True)
                self.process.reporter.going_on()
                if self.stopping:
                    break
        print(flush=True)
        assert last is not None
        peaks = self.divided.peak_memory() if self.divided is not None else [mx.get_peak_memory()]
        counts = {"tokens": last.generation_tokens, "prompt_tokens": last.prompt_tokens}
        memory = {"peak_memory_bytes": max(peaks), "rank_peak_memory_bytes": peaks}
        about = {"prompt": question, "text": "".join(pieces), "finish": last.finish_reason or "stopped"}
        facts = {**about, **counts, **memory, "tokens_per_second": last.generation_tps}
        self.process.reporter.event("result", kind="answer", variant=variant, **facts)


def load(process: TrainingProcess, collective: Collective, task: Task) -> Generator:
    """With the base model, not evaluated. Raises JobError, GroupError, PeerLost."""
    spec = process.spec
    if collective.size > 1 and spec.backend == "nccl":
        raise JobError("a model is not divided over ranks with nccl: MLX has no send and recv for it")
    job = rank_job(spec.job or {}, spec.rank(collective.rank), process.home)
    checksum = files_checksum(job, adapter=False)
    collective.check_equal({"the job's configuration": config_hash(spec.job or {}), "the model": checksum})
    set_up_device(job, collective.rank)
    weights = Path(task.weights) if task.weights is not None and collective.rank == 0 else None
    model, config = build(job, job.model, weights, adapter=True)
    model.eval()
    tokenizer = load_tokenizer(job, config)
    if collective.size == 1:
        return Generator(model, None, tokenizer, Adapter(model), process)
    divided = DividedModel(model, collective, process.control.stop.is_set)
    process.reporter.print(f"layers {format_split(divided.split[::-1])} on ranks 0 to {collective.size - 1}")
    return Generator(divided, divided, tokenizer, Adapter(divided.section.model), process)


def answer_prompts(process: TrainingProcess, collective: Collective) -> None:
    """Answer all prompts of the task. Raises JobError, GroupError, PeerLost."""
    reporter, task = process.reporter, Task(**process.spec.task or {})
    options = GenerateOptions.of(task)
    generator = load(process, collective, task)
    for variant in VARIANTS:
        if variant in options.variants and not generator.stopping:
            reporter.phase("loading")
            if variant == "adapter":
                parts = broadcast_tensors(collective, Path(task.weights or ""))
                generator.adapter.load(parts, fuse=generator.divided is not None)
            generator.adapter.evaluate()
            reporter.phase("generating")
            if process.rank == 0:
                generator.answer_all(variant, options)
            elif generator.divided is not None:
                generator.divided.follow(reporter.going_on)
    # The first rank to exit would take the others down.
    collective.barrier()
    reporter.end(Outcome(not generator.stopping, generator.stopping, 0))
