"""What the PyTorch trainer's parts do without a training, as JSON, for the tests to compare: run by the nodes' python.

    python -m tests.torch.probe REQUEST

The request has one model directory, its rows by format, and the steps of optimizers and schedules.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.protocol.attempt import AttemptSpec
from engine.protocol.job import Job, JobError, TorchSettings
from engine.protocol.task import Task
from engine.torch_trainer.model import load_model, load_tokenizer, row_format
from engine.torch_trainer.optimizer import MlxOptimizer, make_optimizer, make_schedule
from engine.torch_trainer.result_tasks import WeightLoader, answer_prompts
from engine.torch_trainer.strategies import check_group, check_partitioned, join_group

Request = dict[str, Any]


def make_job(request: Request, **keys: Any) -> Job:
    paths: dict[str, Any] = {name: Path(request["model"]) for name in ("model", "data", "adapter_path", "home")}
    return Job(**paths, **keys)


def tokens(request: Request) -> Any:
    """By the names of the rows: every row's tokens, and the index of its first target."""
    found: dict[str, Any] = {}
    for name, rows in request["rows"].items():
        for mask in (False, True):
            job = make_job(request, mask_prompt=mask)
            try:
                tokenise = row_format(job, load_tokenizer(job))(rows[0])
                found[f"{name} {mask}"] = [tokenise(row) for row in rows]
            except ValueError as error:
                found[f"{name} {mask}"] = str(error)
    return found


def optimizers(request: Request) -> Any:
    """The parameter after each step."""
    found = []
    for kind, settings in request["optimizers"]:
        # Every other number of a larger array.
        spread = torch.tensor(request["parameter"]).repeat_interleave(2)
        parameter = nn.Parameter(spread[::2])
        optimizer = MlxOptimizer([parameter], kind, settings)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        steps = []
        for update, gradient in enumerate(request["gradients"], 1):
            parameter.grad = torch.tensor(gradient)
            optimizer.begin(0.1 / update, update)
            optimizer.step()
            steps.append(parameter.tolist())
        found.append(steps)
    return found


def schedules(request: Request) -> Any:
    found = []
    for schedule in request["schedules"]:
        rate = make_schedule(make_job(request, lr_schedule=schedule))
        found.append([rate(step) for step in range(30)])
    return found


def refusals(request: Request) -> Any:
    """What each refuses, as text; "" where nothing is refused."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    spec = AttemptSpec("run", 1, "", "gloo", 1, [])
    two = AttemptSpec("run", 1, "", "gloo", 2, [])
    seen = SimpleNamespace(num_processes=1, distributed_type="DistributedType.MULTI_CPU")
    whole, divided = Accelerator(cpu=True).prepare(nn.Linear(2, 2)), ("optimizer", "gradients", "parameters")
    cases: dict[str, Callable[[], Any]] = {
        "as asked": lambda: check_group(spec, make_job(request, strategy="ddp"), seen),
        "whole": lambda: check_partitioned(whole, ()),
        "world size": lambda: check_group(two, make_job(request, strategy="ddp"), seen),
        "DeepSpeed": lambda: check_group(spec, make_job(request, strategy="deepspeed"), seen),
        "FSDP": lambda: check_partitioned(whole, divided),
        "fp16": lambda: join_group(spec, make_job(request, strategy="ddp"), TorchSettings(precision="fp16")),
        "offload": lambda: join_group(spec, make_job(request, strategy="fsdp"), TorchSettings(offload="cpu")),
        "muon": lambda: make_optimizer(make_job(request, optimizer="muon"), whole.parameters()),
        "adafactor": lambda: make_optimizer(make_job(request, optimizer="adafactor"), whole.parameters()),
        "key": lambda: MlxOptimizer(whole.parameters(), "adam", {"weight_decay": 0.1}),
        "schedule": lambda: make_schedule(make_job(request, lr_schedule={"name": "triangle", "arguments": [1.0]})),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def models(request: Request) -> Any:
    """Why a model is refused, by the case; its trained parameters' norms where it is not."""
    found: dict[str, Any] = {}
    for name, keys in request["models"].items():
        try:
            warnings = found[f"{name}, warnings"] = []
            model = load_model(make_job(request, **keys), torch.float32, warnings.append)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            found[name] = [float(parameter.norm()) for parameter in trained]
        except JobError as error:
            found[name] = str(error)
    empty = Path(request["empty"])
    try:
        load_tokenizer(replace(make_job(request), model=empty))
    except JobError as error:
        found["tokenizer"] = str(error)
    return found


def saved(request: Request) -> Any:
    """What transformers and peft load of the folders: the loss of a text."""
    found = {}
    ids = torch.arange(1, 40)[None]
    for name, folder in request["saved"].items():
        adapter = (Path(folder) / "adapter_config.json").exists()
        model = AutoModelForCausalLM.from_pretrained(request["model"] if adapter else folder)
        base = float(model(input_ids=ids, labels=ids).loss)
        if adapter:
            model = PeftModel.from_pretrained(model, folder)
        weights = load_file(next(Path(folder).glob("*.safetensors")))
        norms = {key: float(value.norm()) for key, value in weights.items()}
        found[name] = {"loss": float(model(input_ids=ids, labels=ids).loss), "base": base, "norms": norms}
    return found


def stock(request: Request) -> Any:
    """What transformers and peft alone compute with the folders, row by row: the mean loss of the texts' tokens, and
    the most probable tokens after the prompt."""
    found = {}
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    for name, folder in request["stock"].items():
        adapter = (Path(folder) / "adapter_config.json").exists()
        model = AutoModelForCausalLM.from_pretrained(request["model"] if adapter else folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, folder) if adapter else model
        losses = []
        with torch.no_grad():
            for text in request["texts"]:
                ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id]])
                logits = model(input_ids=ids[:, :-1]).logits[0]
                losses += nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
            ids = torch.tensor([tokenizer.encode(request["prompt"])])
            start = ids.shape[1]
            while ids.shape[1] < start + request["tokens"] and ids[0, -1] != tokenizer.eos_token_id:
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        answer = tokenizer.decode(ids[0, start:], skip_special_tokens=True)
        found[name] = {"loss": sum(losses) / len(losses), "answer": answer}
    return found


def held(request: Request) -> Any:
    """How many models are still in memory when each of a full fine-tuning's task is loaded."""
    counts, loaded = list[int](), list[weakref.ref[Any]]()

    class CountingLoader(WeightLoader):
        def load(self, path: Path | None) -> Any:
            counts.append(sum(model() is not None for model in loaded))
            model = super().load(path)
            loaded.append(weakref.ref(model))
            return model

    process: Any = SimpleNamespace(rank=0, reporter=mock.Mock(), control=SimpleNamespace(stop=threading.Event()))
    job, nothing = make_job(request, fine_tune_type="full"), mock.Mock()
    loader = CountingLoader(process, job, torch.float32, nothing, torch.device("cpu"), nothing, alone=True)
    options = {"prompts": ["tower"], "variants": ["base", "adapter"], "max_tokens": 2}
    answer_prompts(loader, Task("generate", "source", request["model"], options=options))
    return counts


PARTS = (tokens, optimizers, schedules, refusals, models, saved, stock, held)


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({part.__name__: part(asked) for part in PARTS if part.__name__ in asked["parts"]}))
