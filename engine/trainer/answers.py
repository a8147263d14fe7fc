"""Answers of a run's weights to prompts, and of the base model's. One rank has the whole model; several divide it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from engine.protocol.job import JobError, config_hash
from engine.protocol.partition import format_split
from engine.protocol.task import Task
from engine.trainer.collective import Collective
from engine.trainer.divided_model import DividedModel
from engine.trainer.model import encode_prompt, load_tokenizer, set_up_device
from engine.trainer.variants import broadcast_file, build
from engine.training.data import files_checksum, rank_job
from engine.training.process import TrainingProcess
from engine.training.reporting import Outcome
from engine.training.result_tasks import VARIANTS, Conversation, GenerateOptions, LmEvalOptions, TaskStopped

_LM_EVAL_TOKENS = 256
"""lm-eval's own limit of an answer."""


class Adapter:
    """A run's trained weights in a part of the model: fused into the base, as layers beside it, or left out. The base
    model until `load`."""

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

    def loaded(self, collective: Collective, task: Task, chosen: Sequence[str]) -> Iterator[str]:
        """Each of the `chosen` variants, once the model computes as it. Raises PeerLost."""
        for variant in VARIANTS:
            if variant in chosen and not self.stopping:
                self.process.reporter.phase("loading")
                if variant == "adapter":
                    parts = broadcast_file(collective, Path(task.weights or ""))
                    self.adapter.load(parts, fuse=self.divided is not None)
                self.adapter.evaluate()
                yield variant

    def end(self, collective: Collective) -> None:
        # The first rank to exit would take the others down.
        collective.barrier()
        self.process.reporter.end(Outcome(not self.stopping, self.stopping, 0))

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


class WatchedModel:
    """A generator's whole model, whose calls show that the task goes on, and end it when it is stopped."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator.model, name)

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        if self._generator.stopping:
            raise TaskStopped
        self._generator.process.reporter.going_on()
        return self._generator.model(*inputs, **more)


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
    for variant in generator.loaded(collective, task, options.variants):
        reporter.phase("generating")
        if process.rank == 0:
            generator.answer_all(variant, options)
        elif generator.divided is not None:
            generator.divided.follow(reporter.going_on)
    generator.end(collective)


def do_lm_eval(process: TrainingProcess, collective: Collective) -> None:
    """Do lm-eval's tasks of the task, which mlx-lm connects its models with. Raises JobError, GroupError, PeerLost."""
    # Imports lm-eval, which no other task needs.
    from mlx_lm import evaluate

    task = Task(**process.spec.task or {})
    options, generator = LmEvalOptions(**task.options), load(process, collective, task)
    # By itself it loads a base model from its path.
    evaluate.load = lambda *_, **__: (WatchedModel(generator), generator.tokenizer)

    class LmEvalModel(evaluate.MLXLM):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Any]) -> Any:
            return super().loglikelihood([*map(self._begun, requests)])

        def generate_until(self, requests: list[Any]) -> Any:
            # mlx-lm looks for the limit by another name than lm-eval's, and has one of 8,192 tokens.
            for _, settings in (request.args for request in requests):
                settings.setdefault("max_gen_tokens", settings.get("max_gen_toks", _LM_EVAL_TOKENS))
            return super().generate_until([*map(self._begun, requests)])

        def _begun(self, request: Any) -> Any:
            """With a context of one token where it has none, which mlx-lm cannot compute with: as lm-eval's own models,
            the one that begins a text, else the one that ends it."""
            context, rest = request.args
            if self._tokenize([context])[0]:
                return request
            begin = self.tokenizer.bos_token or self.tokenizer.eos_token
            return replace(request, arguments=(begin, rest))

    with contextlib.suppress(TaskStopped):
        for variant in generator.loaded(collective, task, VARIANTS):
            options.measure(LmEvalModel("", use_chat_template=options.apply_chat_template), variant, process.reporter)
    generator.end(collective)
