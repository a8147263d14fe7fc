"""Trains with one rank in this process, whose disk, gradients or folders are put out of order on the way, and prints
what comes of it as JSON for the tests to compare: run by the nodes' python.

    python -m tests.torch.faults CASE HOME JOB

CASE is one of CASES, JOB the job as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.safetensors import CheckpointError, check_header
from engine.torch_trainer.checkpoint import StateManifest, _newest, send_file
from engine.torch_trainer.model import loss_sum
from engine.torch_trainer.train import TorchLoop, load_training
from engine.torch_trainer.waits import WaitTimer
from engine.training.checkpoint_files import CHUNK_BYTES, FileEntry
from engine.training.data import Batch
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import Diverged, Reporter

_FILE_LIMIT = 7_000
"""Bytes of a file on the full disk: less than the weights, and more than peft's model card, which it writes first."""


class Events(list[dict[str, Any]]):
    """Takes the place of an EventWriter."""

    def write(self, event: str, **fields: Any) -> None:
        self.append({"event": event, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        found = [event for event in self if event["event"] == kind]
        self.clear()
        return found


def load(home: Path, job: dict[str, Any]) -> tuple[TorchLoop, Events]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    spec = AttemptSpec("run", 1, "nonce", "gloo", 1, [RankSpec(0, "n0", sys.executable, str(home))], job)
    events: Any = Events()
    loop = load_training(TrainingProcess(spec, home, 0, Control(), Reporter(events)))
    loop.strategy.model.train()
    return loop, events


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def exchanges(loop: TorchLoop) -> int:
    """How often DDP's one bucket is exchanged in one update. One rank alone trains without DDP."""
    assert not isinstance(loop.strategy.model, DistributedDataParallel)
    loop.strategy.model = DistributedDataParallel(loop.strategy.module)
    loop._waits = WaitTimer(loop.strategy.model, torch.device("cpu"))
    with mock.patch("engine.torch_trainer.waits.allreduce_hook", wraps=allreduce_hook) as exchanged:
        loop.train(1, loop.job.grad_accumulation_steps)
    loop.strategy.model = loop.strategy.module
    return int(exchanged.call_count)


def exchanges_alone(loop: TorchLoop) -> int:
    """How often the only rank gathers in one update."""
    accelerator = loop.strategy.accelerator
    with mock.patch.object(accelerator, "gather", wraps=accelerator.gather) as gather:
        loop.train(1, loop.job.grad_accumulation_steps)
    return int(gather.call_count)


def loss_without_values() -> str:
    """The device of a loss of tensors that have none, so that nothing can wait for them as for a GPU's."""
    batch = Batch(np.ones((2, 4), np.int32), np.array([[1, 4], [2, 3]], np.int32), 4)

    def model(input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.zeros((*input_ids.shape, 5), device="meta"))

    return str(loss_sum(model, batch, torch.device("meta")).device)


def saves_on_a_full_disk(loop: TorchLoop, events: Events, home: Path) -> dict[str, Any]:
    events.clear()
    with full_disk():
        loop.checkpoints.save(loop.point)
        loop._save(loop.job.adapter_path, last=False)
    warnings = [event["message"] for event in events.of("warning")]
    return {"warnings": warnings, "states": names(home / "checkpoints"), "saved": names(loop.job.adapter_path)}


def saves_without_a_folder(loop: TorchLoop, events: Events, home: Path) -> list[str]:
    """Of a state, where its folder cannot be made."""
    place = home / "checkpoints" / ".step-000000001.partial"
    place.touch()
    loop.checkpoints.save(loop.point)
    place.unlink()
    return [event["message"] for event in events.of("checkpoint") if event["phase"] == "failed"]


def saves(loop: TorchLoop, events: Events, home: Path) -> dict[str, Any]:
    """Of a tokenizer with several chat templates, in a folder where a save was killed; a numbered one."""
    loop.tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    folder = loop.job.adapter_path
    (folder / ".saving.killed").mkdir(parents=True)
    (folder / ".best.killed").mkdir()
    for _ in range(2):
        loop._save(folder, last=False)
    *before, last = events.of("checkpoint")
    paths = [event["path"] for event in (*before, last)]
    numbered = folder / f"checkpoint-{loop.point.iteration}"
    weights = "adapter_model.safetensors"
    on_disk = [(path, path.read_bytes()) for path in sorted(numbered.rglob("*")) if path.is_file()]
    return {
        "holds": last["holds"],
        "files": last["files"],
        "on disk": [[str(path.relative_to(numbered)), len(raw), sha256(raw).hexdigest()] for path, raw in on_disk],
        "paths": [str(Path(path).relative_to(folder)) for path in paths],
        "names": names(folder),
        "numbered": names(numbered),
        "written once": (folder / weights).samefile(numbered / weights),
        "templates": names(folder / "additional_chat_templates"),
        "tensors": sorted(check_header(folder / weights).tensors),
    }


def manifest(loop: TorchLoop, home: Path) -> dict[str, Any]:
    """Of a state that is saved while another rank writes its manifest."""
    save = loop.strategy.save

    def save_beside_another_rank(folder: Path) -> None:
        save(folder)
        (folder / ".manifest-1.json.123").write_text("{")

    loop.strategy.save = save_beside_another_rank  # type: ignore[method-assign]
    loop.checkpoints.save(loop.point)
    loop.strategy.save = save  # type: ignore[method-assign]
    (path,) = (home / "checkpoints").glob("step-*/manifest-0.json")
    found = StateManifest.from_json(path.read_bytes())
    return {"files": sorted(entry.name for entry in found.files), "layout": found.layout}


def restored_scale(loop: TorchLoop, home: Path) -> list[float]:
    """The scale of the loss with fp16: of another precision's state, and of its own."""
    accelerator, scaler = loop.strategy.accelerator, torch.amp.GradScaler
    found: list[float] = []
    for saved_with in (None, scaler("cpu", init_scale=8.0)):
        folder = home / f"scale-{len(found)}"
        accelerator.scaler = saved_with
        loop.strategy.save(folder)
        accelerator.scaler = scaler("cpu", init_scale=2.0)
        accelerator.scaler.scale(torch.ones(1))
        loop.strategy.load(folder, converted=False)
        found.append(accelerator.scaler.get_scale())
    accelerator.scaler = None
    return found


def unreadable(loop: TorchLoop, home: Path) -> str:
    (home / "nothing").mkdir()
    try:
        loop.strategy.load(home / "nothing", converted=False)
    except CheckpointError as error:
        return str(error)
    return ""


def sent(home: Path) -> int:
    """How often the sending of a file of three pieces shows that it goes on."""
    (source := home / "source").mkdir()
    (source / "file").write_bytes(content := b"x" * (2 * CHUNK_BYTES + 1))
    pieces: list[None] = []
    entry = FileEntry("file", sha256(content).hexdigest(), len(content), len(content), "none")
    send_file(source, home / "target", entry, 0, lambda: pieces.append(None))
    return len(pieces) if (home / "target" / "file").read_bytes() == content else 0


def newest() -> list[Any]:
    """Of manifests of several attempts on the nodes' disks: the parts and their attempt, or why there is no state."""
    entry = FileEntry("state", 64 * "0", 1, 1, "none")
    point = {"update": 1, "iteration": 1, "window": {}, "best": {}, "versions": {}, "files": (entry,)}

    def text(attempt: int, part: int, parts: int) -> str:
        made = StateManifest("", 2, part, parts, {}, **point, attempt=attempt, layout="dcp")  # type: ignore[arg-type]
        return made.to_json().decode()

    def check(manifest: StateManifest) -> None:
        if (manifest.attempt, manifest.part) == (9, 1):
            raise CheckpointError("tampered with")

    found: list[Any] = []
    for disks in (
        [text(1, 1, 2), text(2, 0, 1)],
        [text(1, 0, 2), text(2, 1, 2)],
        [text(1, 0, 1), text(2, 1, 2), text(2, 0, 2)],
        ["{", text(3, 0, 1)],
        [text(9, 0, 2), text(9, 1, 2)],
    ):
        try:
            found.append([[each.attempt, each.part] for each in _newest(disks, check)[0]])
        except CheckpointError as error:
            found.append(str(error))
    return found


def waits_for_the_gpu() -> list[str]:
    with mock.patch("torch.cuda.synchronize") as synchronize:
        WaitTimer(None, torch.device("cuda", 0)).take()
    return [str(*call.args) for call in synchronize.call_args_list]


def diverges(loop: TorchLoop) -> str:
    """Of a gradient that is not finite."""
    backward = loop.strategy.backward
    loop.strategy.backward = lambda loss: backward(loss * float("inf"))  # type: ignore[method-assign]
    try:
        loop.train(1, loop.job.grad_accumulation_steps)
    except Diverged as error:
        return str(error)
    return ""


def ddp(home: Path, job: dict[str, Any]) -> dict[str, Any]:
    loop, events = load(home, job)
    return {
        "exchanges": exchanges(loop),
        "loss": loss_without_values(),
        "full disk": saves_on_a_full_disk(loop, events, home),
        "no folder": saves_without_a_folder(loop, events, home),
        "saves": saves(loop, events, home),
        "manifest": manifest(loop, home),
        "scale": restored_scale(loop, home),
        "unreadable": unreadable(loop, home),
        "sent": sent(home),
        "newest": newest(),
        "GPU": waits_for_the_gpu(),
        "exchanges alone": exchanges_alone(loop),
    }


def partitioned(home: Path, job: dict[str, Any]) -> dict[str, Any]:
    loop, events = load(home, job)
    loop.train(1, loop.job.grad_accumulation_steps)
    return {
        "full disk": saves_on_a_full_disk(loop, events, home),
        "saves": saves(loop, events, home),
        "layout": manifest(loop, home)["layout"],
        "diverges": diverges(loop),
    }


CASES = {"ddp": ddp, "partitioned": partitioned}


if __name__ == "__main__":
    case, where, asked = sys.argv[1:]
    print("\n" + json.dumps(CASES[case](Path(where), json.loads(asked))), flush=True)
    os._exit(0)
