"""The model on this rank: loaded from a local Hugging Face directory, frozen but for the trained part, with mlx-lm's
meaning of num_layers and lora_parameters; how it is saved for transformers and peft; and its loss of examples, which
are tokenised as mlx-lm does it (mlx_lm/tuner/datasets.py and tokenizer_utils.py), token by token."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from engine.protocol.job import Job, JobError, TorchSettings
from engine.protocol.jsonl import form_of, row_tokeniser
from engine.training.checkpoint_files import list_files, replace_folder
from engine.training.data import Batch, RowFormat, Tokens, partly_resumed
from engine.training.reporting import Files, first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of the computation, by TorchSettings.precision."""


def base_type(job: Job, settings: TorchSettings) -> torch.dtype:
    """That in which the model is loaded to be trained."""
    return torch.float32 if job.fine_tune_type == "full" else DTYPES[settings.precision]


def load_base(job: Job, dtype: torch.dtype) -> Any:
    """The model as it is in the job's directory. Raises JobError."""
    disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            job.model, local_files_only=True, trust_remote_code=job.trust_remote_code, dtype=dtype
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise JobError(f"the model in {job.model} cannot be loaded: {first_line(error)}") from error


def load_model(job: Job, dtype: torch.dtype, warn: Callable[[str], None] = lambda _: None) -> Any:
    """Only trained parameters are unfrozen, and float32; frozen ones are of `dtype`. Raises JobError."""
    # Every rank initialises the same adapter.
    torch.manual_seed(job.seed)
    full = job.fine_tune_type == "full"
    model = load_base(job, dtype)
    name, layers = decoder_layers(model)
    count = job.layers(len(layers))
    first = len(layers) - count if count >= 0 else 0
    model.requires_grad_(False)
    if full:
        layers[first:].requires_grad_(True)
    else:
        model = _with_adapter(job, model, name, first, warn)
    if job.resume_adapter_file is not None:
        _load_trained(job, model, warn)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError(f"[job] num_layers = {job.num_layers}, lora_parameters.keys: there is nothing to train")
    if job.grad_checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of blocks, with its name in the model. Raises JobError."""
    config: Any = model.config
    count = config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise JobError(f"{type(model).__name__} has no list of {count} blocks, as config.json has it")


def _with_adapter(job: Job, model: Any, name: str, first: int, warn: Callable[[str], None]) -> Any:
    """mlx-lm's lora_parameters for peft, from the block `first` of the list `name` on: `keys` are names within a block;
    without them all of its linear layers are meant. Raises JobError."""
    parameters, layers = job.lora_parameters, model.get_submodule(name)
    linear = {path for layer in layers for path, module in layer.named_modules() if isinstance(module, nn.Linear)}
    keys = set(parameters.get("keys") or linear)
    paths = [f".{path}" for path, _ in model.named_modules()]
    for key in sorted(keys):
        if not any(path.endswith(f".{key}") for path in paths):
            warn(f"lora_parameters.keys: no matrix is called {key}: the blocks have {', '.join(sorted(linear))}")
    try:
        rank, scale, dropout = (parameters[key] for key in ("rank", "scale", "dropout"))
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=scale * rank,
            lora_dropout=dropout,
            target_modules=sorted(keys),
            layers_to_transform=list(range(first, len(layers))) if first else None,
            layers_pattern=name.rsplit(".", 1)[-1] if first else None,
            use_dora=job.fine_tune_type == "dora",
        )
        return get_peft_model(model, config, autocast_adapter_dtype=True)
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"[job] lora_parameters or fine_tune_type: {first_line(error)}") from error


def _load_trained(job: Job, model: Any, warn: Callable[[str], None]) -> None:
    """The weights of resume_adapter_file, as `TrainedFolder` writes them. Raises JobError."""
    named = f"[job] resume_adapter_file = {job.resume_adapter_file!r}"
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        weights = load_file(str(job.resume_adapter_file))
        if job.fine_tune_type == "full":
            unknown, lacking = _load_parameters(model, weights), trained - weights.keys()
        else:
            loaded = set_peft_model_state_dict(model, weights)
            unknown, lacking = loaded.unexpected_keys, trained.intersection(loaded.missing_keys)
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise JobError(f"{named}: {' '.join(str(error).split())}") from error
    if unknown:
        raise JobError(
            f"{named}: it has {sorted(unknown)[0]}, which is not in a model that is trained with fine_tune_type = "
            f"{job.fine_tune_type!r}, num_layers = {job.num_layers} and these lora_parameters; a file of mlx-lm does "
            "not fit, either"
        )
    if lacking:
        warn(partly_resumed(job, len(trained) - len(lacking), len(trained)))


def _load_parameters(model: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Returns the names that the model lacks. Raises RuntimeError for other shapes."""
    if not any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()):
        return list(model.load_state_dict(weights, strict=False).unexpected_keys)
    from deepspeed import zero

    for name, parameter in model.named_parameters():
        if name in weights:
            # Of ZeRO-3 each rank has a part; rank 0's whole is divided again.
            with zero.GatheredParameters(parameter, modifier_rank=0):
                if parameter.shape != weights[name].shape:
                    raise RuntimeError(f"size mismatch for {name}: {[*weights[name].shape]}, not {[*parameter.shape]}")
                parameter.data.copy_(weights[name])
    return list(weights.keys() - model.state_dict().keys())


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Trainable parameters, and all; before fully_shard divides them."""
    counts = {p: getattr(p, "ds_numel", p.numel()) for p in model.parameters()}
    return sum(count for parameter, count in counts.items() if parameter.requires_grad), sum(counts.values())


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
    tokenise = row_tokeniser(tokenizer, job.features, mask_prompt=job.mask_prompt)

    def choose(first: dict[str, Any]) -> Callable[[dict[str, Any]], Tokens]:
        form = form_of(first, job.features)
        if form == "text" and job.mask_prompt:
            raise ValueError("Prompt masking not supported for text dataset.")
        return lambda row: tokenise(row, form)

    return choose


def loss_sum(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """The sum of the targets' cross-entropies, a float32 scalar."""
    tokens = torch.from_numpy(batch.tokens).to(device, torch.int64)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    position = np.arange(1, batch.tokens.shape[1])
    mask = (position >= batch.bounds[:, :1]) & (position < batch.bounds[:, 1:])
    # Their numbers are known here: a mask on a GPU would have the program wait for it, to count them.
    targets = torch.from_numpy(np.flatnonzero(mask)).to(device)
    # Only the targets' logits are made float32; with ddp in 16 bits Accelerate has made all of them so already.
    chosen = logits.flatten(0, 1).index_select(0, targets).float()
    return torch.nn.functional.cross_entropy(chosen, tokens[:, 1:].flatten()[targets], reduction="sum")


FACTS_FILE = "training.json"


_SCRATCH = ".saving."
_LEFT = (f"{_SCRATCH}*", ".model.*", ".best.*", ".checkpoint-*.*")
"""Folders that a killed save, or replace_folder in it, has left."""


@dataclass(frozen=True)
class TrainedFolder:
    """Where the trained weights are written, as what `from_pretrained` of transformers (the whole model) or peft (an
    adapter) loads."""

    path: Path
    model: Any
    """Unwrapped."""
    tokenizer: Any

    def save(self, targets: Sequence[Path], weights: Mapping[str, Tensor], facts: dict[str, Any]) -> tuple[int, Files]:
        """Write `weights`, all of the model's or the adapter's, once, as each of the `targets`: folders in `path`, or
        `path` itself. Returns the bytes of the weights, and the files of each target. A reader sees a complete folder
        or the previous one, and in `path`, which holds others as well, each file so. `facts`: about them, for
        FACTS_FILE. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        for pattern in _LEFT:
            for left in self.path.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self.path, ignore_cleanup_errors=True) as scratch:
            whole = Path(scratch, "whole")
            try:
                self.model.save_pretrained(whole, state_dict=dict(weights))
            except SafetensorError as error:
                # A full disk, say.
                raise OSError(first_line(error)) from error
            # peft's model card, an empty form.
            (whole / "README.md").unlink(missing_ok=True)
            self.tokenizer.save_pretrained(whole)
            (whole / FACTS_FILE).write_text(json.dumps(facts, indent=1))
            for target in targets:
                copy = shutil.copytree(whole, Path(scratch, "copy"), copy_function=link)
                if target != self.path:
                    replace_folder(copy, target)
                    continue
                for path in copy.iterdir():
                    place = replace_folder if path.is_dir() else Path.replace
                    place(path, target / path.name)
                copy.rmdir()
            names = [path.relative_to(whole).as_posix() for path in whole.rglob("*")]
            return sum(path.stat().st_size for path in whole.glob("*.safetensors")), list_files(whole, names)


def link(source: str, target: str) -> None:
    """A second name of a file, which nothing writes to again; a copy where the volume has no such links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
