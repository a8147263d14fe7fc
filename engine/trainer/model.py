"""The device and the model on this rank: loads the model, freezes all but the trained part."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.datasets import create_dataset
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model as load_mlx_lm_model
from mlx_lm.utils import load_tokenizer as load_mlx_lm_tokenizer
from mlx_lm.utils import maybe_set_recommended_wired_limit

from engine.node.bootstrap import make_private
from engine.protocol.job import Job, JobError
from engine.protocol.safetensors import misfit
from engine.trainer.tiling import replace_call, tile_layers
from engine.trainer.weights import on_cuda
from engine.training.data import RowFormat, partly_resumed
from engine.training.result_tasks import Conversation, messages_of


def set_up_device(job: Job, rank: int = 0) -> None:
    """Let MLX compile functions or not, and wire as much of the memory as Metal recommends."""
    if not compiles(job):
        mx.disable_compile()
    elif _on_cpu() or mx.cuda.is_available():
        # MLX builds kernels below the system's directory for temporary files, and loads those that it finds there:
        # another user's, or half-written ones of another rank of the host. Kept for the next runs: each takes g++ a
        # third of a second, CUDA's compiler longer. MLX_PTX_CACHE_DIR of the job wins.
        root = next((folder.parent for folder in job.home.parents if folder.name == "runs"), job.home)
        make_private(kernels := root / "kernels" / str(rank))
        os.environ["TMPDIR"] = str(kernels)
    maybe_set_recommended_wired_limit()


def compiles(job: Job) -> bool:
    """MLX compiles functions: on a GPU always; on the CPU if asked to and with g++, a third of a second per kernel."""
    return not _on_cpu() or (job.compile_on_cpu and shutil.which("g++") is not None)


def memory_mib() -> int:
    """Metal's recommended working set, the GPU's memory on CUDA, or else the main memory."""
    if mx.metal.is_available() or mx.cuda.is_available():
        facts = cast("dict[str, Any]", mx.device_info())
        return int(facts["max_recommended_working_set_size" if mx.metal.is_available() else "total_memory"]) // 2**20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def _on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def limit_cache(job: Job) -> None:
    """Release freed memory that MLX keeps beyond the job's clear_cache_threshold, by default 1 GiB; but on a CUDA GPU,
    where allocations wait for the driver, by default none, as stock mlx-lm, while an eighth of it is free."""
    if mx.get_cache_memory() <= (job.clear_cache_threshold or 2**30):
        return
    memory = cast("dict[str, int]", mx.device_info()) if on_cuda() and not job.clear_cache_threshold else None
    if memory is None or memory["free_memory"] <= memory["total_memory"] // 8:
        mx.clear_cache()


def load_model(job: Job, warn: Callable[[str], None] = lambda _: None) -> tuple[nn.Module, Any]:
    """The model and tokenizer of the job, with only the trained parameters unfrozen. For the partitioned strategies it
    is not evaluated yet: parameters that this rank does not keep are never read. Raises JobError."""
    model, config = load_base(job, job.model)
    tokenizer = load_tokenizer(job, config)
    # Every rank initialises the same adapter.
    mx.random.seed(job.seed)
    unfreeze_trained(job, model)
    if job.resume_adapter_file is not None:
        _load_trained(job, model, warn)
    if not tree_flatten(model.trainable_parameters()):
        raise JobError(f"[job] num_layers = {job.num_layers}, lora_parameters.keys: there is nothing to train")
    if job.sequence_tiling:
        tile_layers(model.layers, job.sequence_tiling)
    if job.strategy in ("data", "local"):
        recompute_layers(model.layers, job.grad_checkpoint)
        mx.eval(model.parameters())
    return model, tokenizer


def load_base(job: Job, path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model in the directory `path`, frozen, with none of its parameters read yet; and its configuration."""
    model, config = load_mlx_lm_model(path, lazy=True, trust_remote_code=job.trust_remote_code)
    model.freeze()
    return model, config


def load_tokenizer(job: Job, config: dict[str, Any]) -> Any:
    """`config`: of the job's model."""
    trust = {"trust_remote_code": job.trust_remote_code}
    return load_mlx_lm_tokenizer(job.model, trust, eos_token_ids=config.get("eos_token_id"))


def encode_prompt(tokenizer: Any, prompt: str | Conversation, *, raw: bool) -> list[int]:
    """The tokens of a user's message or a conversation, by the chat template, if there is one, unless `raw`."""
    messages = messages_of(prompt)
    if raw or not tokenizer.has_chat_template:
        text = "\n".join(message["content"] for message in messages)
        special = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
    else:
        text, special = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), False
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return tokens


def unfreeze_trained(job: Job, model: nn.Module) -> None:
    """Those layers of a frozen model that the job trains: its own, or those of LoRA or DoRA that are added here, and
    leave the model's output as it is. Raises JobError."""
    layers = job.layers(len(model.layers))
    if job.fine_tune_type == "full":
        for layer in model.layers[-max(layers, 0) :]:
            layer.unfreeze()
        return
    try:
        linear_to_lora_layers(model, layers, job.lora_parameters, use_dora=job.fine_tune_type == "dora")
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"[job] lora_parameters or fine_tune_type: {error}") from error


def _load_trained(job: Job, model: nn.Module, warn: Callable[[str], None]) -> None:
    """The weights of resume_adapter_file. Raises JobError."""
    named = f"[job] resume_adapter_file = {job.resume_adapter_file!r}"
    try:
        weights: Any = mx.load(str(job.resume_adapter_file))
    except (RuntimeError, ValueError) as error:
        raise JobError(f"{named}: {error}") from error
    loaded = {name: value.shape for name, value in weights.items()} if isinstance(weights, dict) else {}
    trained = dict(tree_flatten(model.trainable_parameters()))
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    if (why := misfit(loaded, shapes, trained)) is not None:
        raise JobError(f"{named}: {why}")
    if lacking := len(trained.keys() - loaded.keys()):
        warn(partly_resumed(job, len(trained) - lacking, len(trained)))
    model.load_weights(list(weights.items()), strict=False)


def recompute_layers(layers: Sequence[nn.Module], wanted: bool | int) -> None:
    """The first `wanted` trained ones of `layers` (True: all) keep only their input, and compute the rest again in the
    backward pass. The first, since the backward pass comes to them last: what the others kept is free by then, and a
    layer that is computed again adds nothing to the peak."""
    trained = [layer for layer in layers if tree_flatten(layer.trainable_parameters())]
    for layer in trained if wanted is True else trained[:wanted]:
        # mlx-lm's grad_checkpoint changes the class, and so all layers.
        replace_call(layer, _recomputing)


def _recomputing(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not layer.training:
        return super(type(layer), layer).__call__(*args, **kwargs)
    trained = layer.trainable_parameters()
    generator: Any = mx.random.state
    start = mx.array(generator[0])
    runs = itertools.count()

    def compute(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        layer.update(parameters)
        # Dropout draws the same numbers in both runs, and the second one leaves the generator as it was.
        before = mx.array(generator[0])
        generator[0][:] = start
        output = super(type(layer), layer).__call__(*args, **kwargs)
        if next(runs):
            generator[0][:] = before
        layer.update(trained)
        return output

    return mx.checkpoint(compute)(trained, *args, **kwargs)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Trainable parameters, and all (quantized ones as stored)."""
    trainable = sum(value.size for _, value in tree_flatten(model.trainable_parameters()))
    return trainable, sum(value.size for _, value in tree_flatten(model.parameters()))


def row_format(job: Job, tokenizer: Any) -> RowFormat:
    return lambda first: create_dataset([first], tokenizer, job).process
