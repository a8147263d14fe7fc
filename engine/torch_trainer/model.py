"""The model on this rank: loaded from a local Hugging Face directory, frozen but for the trained part, with mlx-lm's
meaning of num_layers and lora_parameters; and how it is saved for transformers and peft.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from engine.protocol.job import Job, JobError, TorchSettings
from engine.training.checkpoint_files import replace_folder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the computation, by TorchSettings.precision."""


def load_model(job: Job, settings: TorchSettings) -> Any:
    """The model, with only the trained parameters unfrozen. These are float32; frozen ones have the type of the
    computation. Raises JobError."""
    # Every rank initialises the same adapter.
    torch.manual_seed(job.seed)
    disable_progress_bar()
    full = job.fine_tune_type == "full"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            job.model,
            local_files_only=True,
            trust_remote_code=job.trust_remote_code,
            dtype=torch.float32 if full else DTYPES[settings.precision],
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise JobError(f"the model in {job.model} cannot be loaded: {str(error).splitlines()[0]}") from error
    name, layers = decoder_layers(model)
    count = job.layers(len(layers))
    first = len(layers) - count if count >= 0 else 0
    model.requires_grad_(False)
    if full:
        layers[first:].requires_grad_(True)
    else:
        model = get_peft_model(model, _lora_config(job, name, layers, first), autocast_adapter_dtype=True)
    if job.resume_adapter_file is not None:
        _load_trained(job, model)
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


def _lora_config(job: Job, name: str, layers: nn.ModuleList, first: int) -> LoraConfig:
    """mlx-lm's lora_parameters for peft: `keys` are names within a block; without them all of its linear layers are
    meant. Raises JobError."""
    parameters = job.lora_parameters
    linear = {path for layer in layers for path, module in layer.named_modules() if isinstance(module, nn.Linear)}
    keys = set(parameters.get("keys") or linear)
    try:
        rank, scale, dropout = (parameters[key] for key in ("rank", "scale", "dropout"))
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=scale * rank,
            lora_dropout=dropout,
            target_modules=sorted(keys),
            layers_to_transform=list(range(first, len(layers))) if first else None,
            layers_pattern=name.rsplit(".", 1)[-1] if first else None,
            use_dora=job.fine_tune_type == "dora",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"[job] lora_parameters or fine_tune_type: {error}") from error


def _load_trained(job: Job, model: Any) -> None:
    """The weights of resume_adapter_file, as `save_trained` writes them. Raises JobError."""
    try:
        weights = load_file(str(job.resume_adapter_file))
        if job.fine_tune_type == "full":
            model.load_state_dict(weights, strict=False)
        else:
            set_peft_model_state_dict(model, weights)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise JobError(f"[job] resume_adapter_file = {job.resume_adapter_file!r}: {error}") from error


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Trainable parameters, and all; before fully_shard divides them."""
    counts = [(getattr(each, "ds_numel", each.numel()), each.requires_grad) for each in model.parameters()]
    return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)


FACTS_FILE = "training.json"


def save_trained(target: Path, model: Any, tokenizer: Any, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> int:
    """Write a folder that `from_pretrained` of transformers (the whole model) or peft (an adapter) loads; returns the
    bytes of its weights. A reader sees a complete folder or the previous one, and of an adapter each file so, since
    its folder holds others as well. `weights`: all of the unwrapped `model`'s, or the adapter's; `facts`: about them,
    for FACTS_FILE. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
    ) as folder:
        scratch = Path(folder) / target.name
        model.save_pretrained(scratch, state_dict=dict(weights))
        # peft's model card, an empty form.
        (scratch / "README.md").unlink(missing_ok=True)
        tokenizer.save_pretrained(scratch)
        (scratch / FACTS_FILE).write_text(json.dumps(facts, indent=1))
        size = sum(path.stat().st_size for path in scratch.glob("*.safetensors"))
        if (scratch / "config.json").exists() or not target.exists():
            replace_folder(scratch, target)
        else:
            for path in scratch.iterdir():
                path.replace(target / path.name)
    return size
