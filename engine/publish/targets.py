"""LM Studio, Ollama and llama.cpp: the weights that each can load, the folder that it reads, and the commands that come
after. Nothing is run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from engine.errors import InputError, StateError
from engine.publish.model_card import TrainedRun, model_card
from engine.publish.model_folder import ModelFolder, read_document

_LM_STUDIO = Path("~/.lmstudio/models")
"""<models>/<publisher>/<model>/: https://lmstudio.ai/docs/advanced/sideload"""
_OLLAMA = {f"{name}ForCausalLM" for name in ("Cohere", "Gemma", "Gemma2", "Gemma3", "Llama", "Phi3", "Qwen2")}
"""Architectures that `ollama create` converts itself (convert/convert.go at fb307609, 2026-08-21)."""
_OTHERS = "Cohere2 Ernie4_5 Glm Glm4 Granite HunYuanDenseV1 Mistral Nemotron Olmo2 Phi Qwen3 SeedOss SmolLM3 StableLm"
CONVERTED = _OLLAMA | {f"{name}ForCausalLM" for name in _OTHERS.split()}
"""Those of llama.cpp's converter (conversion/__init__.py at 00bdaa10, 2026) whose weights mlx-lm 0.32.2 saves by the
names and with the values of transformers 5.23."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_GGUF = "python $LLAMA_CPP/convert_hf_to_gguf.py {} --outfile {}.gguf --outtype auto"


@dataclass(frozen=True)
class Publication:
    folder: Path | None = None
    url: str | None = None
    commands: tuple[str, ...] = ()
    """To run in the folder next; LLAMA_CPP is a checkout of https://github.com/ggml-org/llama.cpp."""


def check_target(target: str, folder: ModelFolder, run: str) -> None:
    """Raises InputError where the target cannot load these weights."""
    todo, why, config = f"fuse them into the base model: flightdeck fuse {run} --dequantize", None, folder.config
    if folder.holds == "weights" or (target == "lmstudio" and folder.holds == "adapter"):
        why, todo = "they are not a whole model", todo.removesuffix(" --dequantize")
    elif target == "lmstudio":
        return
    elif folder.holds == "adapter":
        why = _adapter_fault(folder)
    elif config.get("quantization") or config.get("quantization_config"):
        why = "they are quantized, which llama.cpp's converter does not read"
    elif folder.architecture is None:
        why, todo = "llama.cpp's converter chooses by architectures of config.json", "name transformers' class there"
    elif folder.library == "mlx" and folder.architecture not in CONVERTED:
        why = f"what mlx-lm saves of {folder.architecture} is not known to be what llama.cpp's converter reads"
        todo = "use mlx-lm or LM Studio"
    if why is not None:
        raise InputError(f"--{target} cannot take these weights", where=str(folder.path), why=why, todo=todo)


def _adapter_fault(folder: ModelFolder) -> str | None:
    """Why convert_lora_to_gguf.py does not take an adapter, or takes it for another."""
    if folder.library == "mlx":
        return "llama.cpp's converter takes peft's adapters alone, and Ollama's does not read the scale of mlx-lm's"
    for name in folder.tensors:
        if not name.endswith((".lora_A.weight", ".lora_B.weight")) or "lm_head" in name:
            return f"llama.cpp's converter does not take {name}"
    return "llama.cpp's converter does not take use_rslora" if folder.config.get("use_rslora") else None


def write_target(run: TrainedRun, folder: ModelFolder) -> Publication:
    """Write the target's folder; it is complete, or not there. Raises InputError, StateError."""
    target, name, place, models = run.request.target, run.record.id, run.request.place, _LM_STUDIO.expanduser()
    check_target(target, folder, name)
    if target == "lmstudio" and place is None and not models.is_dir():
        raise InputError("LM Studio's models were not found", where=str(_LM_STUDIO), todo="give their folder")
    below = f"flightdeck/{name}" if target == "lmstudio" else f"{name}-{target}"
    path = Path(place or (models if target == "lmstudio" else "."), below).expanduser()
    if path.exists():
        raise InputError("it is published there already", where=str(path), todo="remove it, or give another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=path.parent, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch, name)
            made.mkdir()
            folder.copy(made, run.base, _link)
            if target == "ollama":
                (made / "Modelfile").write_text(_modelfile(folder, name), encoding="utf-8")
            usage = _commands(target, folder, name, run.base)
            (made / "README.md").write_text(model_card(run, folder, name, usage), encoding="utf-8")
            made.rename(path)
    except OSError as error:
        # A copy's error names the file that is read, also where the one that is written is at fault.
        read = error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT) and error.filename
        where = path if not read or Path(read).is_relative_to(path.parent) else read
        raise StateError("it cannot be published", where=str(where), why=error) from error
    return Publication(path, commands=tuple(_commands(target, folder, name, run.config.job.model or run.base)))


def _commands(target: str, folder: ModelFolder, name: str, base: str) -> list[str]:
    """`base`: an adapter's base model."""
    if target == "lmstudio":
        return ['mlx_lm.generate --model . --prompt "..."']
    model, lora, convert = name, "", [_GGUF.format(".", name)]
    if folder.holds == "adapter":
        model, lora, convert = "base", f" --lora {name}.gguf", [_GGUF.format(quote(base), "base")]
        convert.append(f"python $LLAMA_CPP/convert_lora_to_gguf.py . --outfile {name}.gguf --base {quote(base)}")
    if target == "ollama":
        convert = [] if folder.architecture in _OLLAMA else convert
        return [*convert, f"ollama create {name} -f Modelfile", f"ollama run {name}"]
    quantize = f"llama-quantize {model}.gguf {model}-Q4_K_M.gguf Q4_K_M"
    return [*convert, quantize, f'llama-cli -m {model}-Q4_K_M.gguf{lora} -p "..."']


def _modelfile(folder: ModelFolder, name: str) -> str:
    """https://docs.ollama.com/modelfile; the tokenizer's own template is in what is converted."""
    lines = ["FROM ."] if folder.architecture in _OLLAMA else [f"FROM ./{name}.gguf"]
    if folder.holds == "adapter":
        lines = ["FROM ./base.gguf", f"ADAPTER ./{name}.gguf"]
    tokenizer, generation = (read_document(folder.path / f"{part}_config.json") for part in ("tokenizer", "generation"))
    lines += [f"PARAMETER {key} {value}" for key in _SAMPLING if isinstance(value := generation.get(key), int | float)]
    end = tokenizer.get("eos_token")
    if isinstance(end := end.get("content") if isinstance(end, dict) else end, str):
        lines.append(f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}")
    if folder.holds == "model" and not ("chat_template" in tokenizer or "chat_template.jinja" in folder.files):
        lines.append('TEMPLATE "{{ .Prompt }}"')
    return "\n".join(lines) + "\n"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
