"""The tasks on what a run has trained, with PyTorch: its weights measured, merged by PEFT, and asked by transformers.
The model is whole on every rank that has one, however it was trained; rank 0 alone has the trained weights' files, and
the others get the tensors from it. It answers alone."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import AutoConfig, GenerationConfig, TextStreamer

from engine.protocol.job import Job, JobError, TorchSettings
from engine.protocol.safetensors import check_header
from engine.protocol.sizes import size_text
from engine.protocol.task import Task
from engine.torch_trainer.checkpoint import all_gather_object
from engine.torch_trainer.model import (
    TrainedFolder,
    base_type,
    load_base,
    load_model,
    load_tokenizer,
    loss_sum,
    row_format,
)
from engine.torch_trainer.saved_weights import assembled
from engine.torch_trainer.strategies import join_group
from engine.torch_trainer.train import peak_memory, sum_over_ranks
from engine.training.data import EMPTY, DataLoader, rank_job
from engine.training.process import TrainingProcess
from engine.training.reporting import Outcome, SavedWeights, check_equal
from engine.training.result_tasks import (
    VARIANTS,
    Conversation,
    FusionTask,
    GenerateOptions,
    LmEvalOptions,
    MeasuredVariants,
    TaskStopped,
    evaluated_split,
    messages_of,
    remove_leftovers,
)

_ADAPTER = "adapter_model.safetensors"
_BESIDE_WEIGHTS = 1.1
"""Least memory of a rank that computes with weights, as a factor of their bytes."""
_LONGEST = timedelta(days=365)
"""How long ranks wait for one that answers; a group's own limit is half an hour."""


@dataclass(frozen=True)
class WeightLoader:
    """Every call is made by every rank."""

    process: TrainingProcess
    job: Job
    dtype: torch.dtype
    """That of the weights that are not trained."""
    accelerator: Accelerator
    device: torch.device
    """The CPU, where the whole model does not fit the GPU."""
    ranks: dist.ProcessGroup
    """All of them, to wait for one."""
    alone: bool = False
    """The others take no part in `load`."""

    @classmethod
    def of(cls, process: TrainingProcess) -> WeightLoader:
        """Form the group. Raises JobError, GroupError."""
        spec = process.spec
        raw, settings = spec.job or {}, TorchSettings.from_spec(spec.job or {})
        job = rank_job(raw, spec.rank(process.rank), process.home)
        job = replace(job, strategy="ddp", grad_checkpoint=False, resume_adapter_file=None)
        accelerator = join_group(spec, job, replace(settings, offload="none"))
        dtype = base_type(job, settings)
        needed = int(_BESIDE_WEIGHTS * weight_bytes(job.model, dtype))
        ranks = dist.new_group(backend="gloo", timeout=_LONGEST)
        return cls(process, job, dtype, accelerator, choose_device(job.model, needed, accelerator.device), ranks)

    def load(self, path: Path | None) -> Any:
        """The job's model with the weights in `path`, a folder of rank 0's; None: none. Raises JobError."""
        whole = path is not None and not (path / _ADAPTER).exists()
        whole = whole if self.alone else all_gather_object(whole)[0]
        mine = path if self.process.rank == 0 else None
        if path is None or whole:
            model = load_base(replace(self.job, model=mine or self.job.model), self.dtype)
        else:
            trained = str(mine / _ADAPTER) if mine is not None else None
            model = load_model(replace(self.job, resume_adapter_file=trained), self.dtype, self.process.reporter.warn)
        for parameter in model.parameters() if path is not None and not self.alone else ():
            if whole or parameter.requires_grad:
                dist.broadcast(parameter.data, 0)
        return model.eval().to(self.device)

    def use_variants(self, task: Task, chosen: Sequence[str], use: Callable[[str, Any], None]) -> None:
        """Call `use` with each of the `chosen` and its model: one is in memory at a time. Raises JobError."""
        trained = Path(task.weights) if task.weights is not None else None
        # Its base is the model without it.
        adapter, model = trained is not None and self.job.fine_tune_type != "full", None
        for variant in [variant for variant in VARIANTS if variant in chosen]:
            self.process.reporter.phase("loading")
            if model is None or not adapter:
                model = None
                # Libraries leave references in circles.
                gc.collect()
                model = self.load(trained if adapter or variant == "adapter" else None)
            with model.disable_adapter() if adapter and variant == "base" else contextlib.nullcontext():
                use(variant, model)

    def end(self) -> None:
        # The first rank to exit would take the others down.
        dist.barrier(self.ranks)
        stopped = self.process.control.stop.is_set()
        self.process.reporter.end(Outcome(not stopped, stopped, 0))


def weight_bytes(directory: Path, dtype: torch.dtype) -> int:
    """Those of a model's safetensors files, in memory as `dtype`. Raises CheckpointError, OSError."""
    headers = (check_header(file, exact=False) for file in directory.glob("model*.safetensors"))
    shapes = (shape for header in headers for _, shape in header.tensors.values())
    return sum(map(math.prod, shapes)) * int(dtype.itemsize)


def choose_device(model: Path, needed: int, device: torch.device) -> torch.device:
    """The GPU, if any, where so many bytes fit it, else the CPU. Raises JobError where they do not fit that, either."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > needed:
        return device
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    lines = file.read_text().splitlines() if (file := Path("/proc/meminfo")).exists() else []
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), math.inf)
    if needed * ranks > free:
        raise JobError(
            f"the ranks of this node need {ranks} x {size_text(needed)} for the model in {model}, and "
            f"{size_text(free)} are free: it is whole on each, however it was trained"
        )
    return torch.device("cpu")


@dataclass(frozen=True)
class TorchVariants(MeasuredVariants):
    loader: WeightLoader
    tokenizer: Any
    shares: DataLoader

    @classmethod
    def of(cls, loader: WeightLoader, task: Task) -> TorchVariants:
        """Raises JobError, GroupError."""
        process, job, tokenizer = loader.process, loader.job, load_tokenizer(loader.job)
        split, examples = evaluated_split(job, task, row_format(job, tokenizer), process.reporter)
        shares = DataLoader(None, job, [rank.share for rank in process.spec.ranks], process.rank, process.reporter)
        variants = cls(process, job, task, split, examples, loader, tokenizer, shares)
        check_equal(all_gather_object(variants.facts))
        return variants

    def broadcast(self, value: Any) -> Any:
        return all_gather_object(value)[0]

    def _sum(self, values: list[float]) -> list[float]:
        return sum_over_ranks(self.loader.accelerator, values)

    def _load(self, path: Path | None) -> Any:
        return self.loader.load(path)

    def _losses(self, model: Any) -> Iterator[tuple[float, int]]:
        for indices in self._batches():
            share = self.shares.validation_share(self.examples, indices)
            batch = self.examples.batch(share) if len(share) else EMPTY
            with torch.no_grad(), self.loader.accelerator.autocast():
                loss = float(loss_sum(model, batch, self.loader.device))
            yield loss, batch.targets


@dataclass(frozen=True)
class PeftMerge(FusionTask):
    """By `merge_and_unload`, in the type of the base: the model and one layer's update are in memory."""

    variants: TorchVariants

    def run_to_end(self) -> None:
        job, options = self.variants.job, self.variants.task.options
        if self._config.to_dict().get("quantization_config"):
            todo = "train on the base that is not, or use the adapter as it is"
            raise JobError(f"the base {job.model} is quantized, and PEFT's merge would round what was learned: {todo}")
        if options.get("dequantize") or options.get("bits"):
            raise JobError("dequantize and bits are for a quantized base, and this one is not")
        super().run_to_end()

    @property
    def _config(self) -> Any:
        job = self.variants.job
        return AutoConfig.from_pretrained(job.model, local_files_only=True, trust_remote_code=job.trust_remote_code)

    @property
    def _dtype(self) -> torch.dtype:
        return self._config.dtype or torch.float32

    @property
    def _model_bytes(self) -> int:
        return weight_bytes(self.variants.job.model, self._dtype)

    def _write(self) -> tuple[SavedWeights, str] | tuple[None, None]:
        variants, job, dtype = self.variants, self.variants.job, self._dtype
        if job.fine_tune_type == "full":
            model = load_base(replace(job, model=self.source), dtype)
        else:
            trained = str(self.source / _ADAPTER)
            model = load_model(replace(job, resume_adapter_file=trained), dtype).merge_and_unload()
        if variants.process.control.stop.is_set():
            return None, None
        facts = {"run": job.home.name, "source": variants.task.source}
        folder = TrainedFolder(self.scratch, model, variants.tokenizer)
        size, files = folder.save([self.scratch], model.state_dict(), facts)
        rounding = f"rounding to {str(dtype).removeprefix('torch.')}"
        return SavedWeights(self.scratch, size, "model", self.scratch, files), rounding


@dataclass(frozen=True)
class TorchGenerator:
    process: TrainingProcess
    tokenizer: Any
    options: GenerateOptions
    device: torch.device

    def answer(self, model: Any, variant: str, prompt: str | Conversation) -> None:
        """One answer, printed as it comes, and reported."""
        messages, reporter, options = messages_of(prompt), self.process.reporter, self.options
        question = messages[-1]["content"]
        reporter.print(f"{variant}: {question}")
        inputs = self._encoded(messages).to(self.device)
        times = list[float]()

        def is_stopped(tokens: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            reporter.going_on()
            return torch.full((1,), self.process.control.stop.is_set(), device=tokens.device)

        model.generation_config = self._settings(model.generation_config)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        torch.manual_seed(options.seed)
        with torch.no_grad():
            tokens = model.generate(**inputs, streamer=streamer, stopping_criteria=[is_stopped])[0]
        asked = inputs["input_ids"].shape[1]
        count = len(tokens) - asked
        text = self.tokenizer.decode(tokens[asked:], skip_special_tokens=True)
        rate = (count - 1) / (times[-1] - times[0]) if count > 1 else 0.0
        counts = {"tokens": count, "prompt_tokens": asked, "tokens_per_second": rate}
        about = {"prompt": question, "text": text, "peak_memory_bytes": peak_memory(self.device)}
        reporter.event("result", kind="answer", variant=variant, **about, **counts)

    def _encoded(self, messages: Conversation) -> Any:
        if self.options.raw or not self.tokenizer.chat_template:
            return self.tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
        form = {"return_tensors": "pt", "return_dict": True}
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **form)

    def _settings(self, given: Any) -> GenerationConfig:
        """The task's alone: without the sampling and the penalties that the model `given` to it has."""
        ends = given.eos_token_id if isinstance(given.eos_token_id, list) else [given.eos_token_id]
        ends = sorted({end for end in (*ends, self.tokenizer.eos_token_id) if end is not None})
        options = self.options
        sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
        return GenerationConfig(
            max_new_tokens=options.max_tokens,
            do_sample=options.temperature > 0,
            eos_token_id=ends,
            pad_token_id=given.pad_token_id if given.pad_token_id is not None else ends[0] if ends else 0,
            **(sampling if options.temperature > 0 else {}),
        )


def answer_prompts(loader: WeightLoader, task: Task) -> None:
    """On rank 0. Raises JobError."""
    process, options = loader.process, GenerateOptions.of(task)
    stop = process.control.stop
    generator = TorchGenerator(process, load_tokenizer(loader.job), options, loader.device)

    def answer(variant: str, model: Any) -> None:
        process.reporter.phase("generating")
        for prompt in options.prompts:
            if not stop.is_set():
                generator.answer(model, variant, prompt)

    loader.use_variants(task, options.variants, answer)


def do_lm_eval(loader: WeightLoader, task: Task) -> None:
    """Do lm-eval's tasks of the task, on rank 0. Raises JobError."""
    from lm_eval.models.huggingface import HFLM

    process, options = loader.process, LmEvalOptions(**task.options)
    tokenizer = load_tokenizer(loader.job)

    def go_on(*_: object) -> None:
        if process.control.stop.is_set():
            raise TaskStopped
        process.reporter.going_on()

    def measure(variant: str, model: Any) -> None:
        model.get_input_embeddings().register_forward_pre_hook(go_on)
        lm = HFLM(model, tokenizer=tokenizer, batch_size=loader.job.batch_size)
        options.measure(lm, variant, process.reporter)

    with contextlib.suppress(TaskStopped):
        loader.use_variants(task, VARIANTS, measure)


def run(process: TrainingProcess) -> None:
    """One rank's part of the task. Raises JobError, GroupError, OSError."""
    remove_leftovers(process.home)
    loader = WeightLoader.of(process)
    with assembled(process, loader.job, loader.dtype, Task(**process.spec.task or {})) as task:
        if task.kind in ("generate", "lm_eval"):
            if process.rank == 0:
                do = answer_prompts if task.kind == "generate" else do_lm_eval
                do(replace(loader, alone=True), task)
            else:
                process.reporter.phase("waiting")
            loader.end()
        elif task.kind == "fuse":
            PeftMerge(TorchVariants.of(loader, task)).run_to_end()
        else:
            TorchVariants.of(loader, task).measure_all()
