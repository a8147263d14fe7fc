"""Trainings that a part asks for, in a process of its own, which imports nothing of the head; see
tests.gpu.mlx_device.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx_lm.tuner.callbacks import TrainingCallback

from engine.demo_model import make
from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.events import EventWriter
from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.saving import EmergencyCheckpoint
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.collective import Collective
from engine.trainer.train import load_training
from engine.training.checkpoint_files import Origin
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import Reporter
from tests.bench import stock
from tests.bench.equal_data import write_equal_data
from tests.bench.memory_step import write_weights
from tests.gpu.mlx_device import Answer, answer_request

_FILES = ("tokenizer.json", "tokenizer_config.json")


class Enough(Exception):
    """What is measured has been; it ends the training before anything is saved."""


class Reports:
    """The reports of a training: the seconds, targets and highest memory so far at every `per_report` iterations, of
    which the first is the warm-up. Ends it with Enough after at least `least` more and `seconds`."""

    def __init__(self, run: Answer) -> None:
        self.least, self.seconds = int(run["reports"]), float(run.get("seconds", 0.0))
        self.at: list[float] = []
        self.processor: list[float] = []
        """Seconds of all the process's threads."""
        self.tokens: list[int] = []
        self.peak = 0
        self.losses: list[float] = []

    def add(self, tokens: int, peak: int) -> None:
        """`tokens`: targets since the start."""
        self.at.append(time.perf_counter())
        self.processor.append(time.process_time())
        self.tokens.append(tokens)
        self.peak = max(self.peak, peak)
        if len(self.at) > self.least and self.at[-1] - self.at[0] >= self.seconds:
            raise Enough

    def answer(self) -> Answer:
        counted, seconds = self.tokens[-1] - self.tokens[0], self.at[-1] - self.at[0]
        return {
            "tokens": counted,
            "seconds": seconds,
            "processor_s": self.processor[-1] - self.processor[0],
            "tokens_per_s": counted / seconds if seconds else None,
            "reports": len(self.at),
            "peak_bytes": self.peak,
            "losses": self.losses,
        }


class Clock(TrainingCallback):  # type: ignore[misc]  # mlx-lm has no types
    """The reports of stock mlx-lm."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self._reports.losses.append(train_info["train_loss"])
        self._reports.add(int(train_info["trained_tokens"]), round(train_info["peak_memory"] * 1e9))


class Recorder(Reporter):
    """The reports of our trainer, which go nowhere else."""

    def __init__(self, reports: Reports) -> None:
        super().__init__(EventWriter(None, 0, 1))
        self._reports = reports

    def event(self, event: str, **fields: Any) -> None:
        if event == "step":
            self._reports.losses.append(fields["loss"])

    def report(self, iterations: int, values: dict[str, Any]) -> None:
        self._reports.add(int(values["trained_tokens"]), round(values["peak_memory"] * 1e9))


def train_ours(run: Answer, folder: Path, reports: Reports) -> None:
    """Our trainer's own loop, on one rank, in this process."""
    rank = RankSpec(0, "here", sys.executable, str(folder))
    spec = AttemptSpec("run", 1, "0" * 32, "ring", 1, [rank], job=run["job"])
    load_training(
        TrainingProcess(spec, folder, 0, Control(), Recorder(reports)), Collective("any", 1, 0)
    ).run_and_test()


def train_stock(run: Answer, folder: Path, reports: Reports) -> None:
    """mlx_lm.lora's own main program, in this process."""
    config = folder / "options.json"
    config.write_text(json.dumps({**run["job"], "train": True}))
    stock.train(str(config), Clock(reports))


TRAINERS: dict[str, Callable[[Answer, Path, Reports], None]] = {"ours": train_ours, "stock": train_stock}


def trainings(request: Answer) -> Iterator[Answer]:
    """One after the other; what each needs is free before the next begins. One that fails says how."""
    for run in request["runs"]:
        mx.set_default_device(mx.cpu if run["device"] == "cpu" else mx.gpu)
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        before, reports = mx.get_active_memory(), Reports(run)
        answer: Answer = {"name": run["name"], "before_bytes": before}
        with TemporaryDirectory(dir=request["folder"]) as name:
            try:
                folder = Path(name)
                run["job"].setdefault("adapter_path", str(folder / "adapters"))
                TRAINERS[run["trainer"]](run, folder, reports)
                answer["failure"] = "it ended before enough was measured"
            except Enough:
                answer |= reports.answer()
            except Exception as error:
                traceback.print_exc()
                answer |= {"failure": f"{type(error).__name__}: {error}", "reports": len(reports.at)}
        yield answer


def models(request: Answer) -> Iterator[Answer]:
    """Writes each of `configs` (name → config.json) with random weights, and examples of `tokens` tokens each."""
    folder = Path(request["folder"])
    demo = folder / "demo"
    if not demo.exists():
        demo.mkdir()
        make(demo)
    for tokens in request.get("tokens", ()):
        if not (data := folder / f"tokens-{tokens}").exists():
            write_equal_data(data, demo / "model", tokens, request["examples"])
    for name, config in request["configs"].items():
        started = time.perf_counter()
        (directory := folder / name).mkdir(exist_ok=True)
        for file in _FILES:
            (directory / file).write_bytes((demo / "model" / file).read_bytes())
        (directory / "config.json").write_text(json.dumps(config))
        mx.random.seed(7)
        write_weights(directory)
        mx.clear_cache()
        size = (directory / "model.safetensors").stat().st_size
        yield {"name": name, "bytes": size, "seconds": time.perf_counter() - started}


_NEVER_ENDS = "volatile const float* awaited = own; while (awaited[0] != -1.0f) { __nanosleep(1000); } out[0] = 1.0f;"
_ASKED_AFTER_S = {"cpu": 1.0, "cuda": 5.0}
"""By device: CUDA's compiler is to be through with the kernel, so that the state is saved while it runs."""


def hang(request: Answer) -> Iterator[Answer]:
    """Hold a state, wait in MLX for what never comes, and save the state from another thread, which ends the process
    with code 0; `saved` reads it."""
    folder, state = Path(request["folder"]), _state(request)
    reporter = Reporter(EventWriter(folder / "events.jsonl", 0, 1))
    checkpoint = EmergencyCheckpoint(folder, 1, 0, Origin("visit", 1, 0, 1, {}), reporter)
    checkpoint.hold(Snapshot(2, 1, {}, {"weights": state}))
    yield {"bytes": sum(value.nbytes for value in state.values())}
    threading.Timer(_ASKED_AFTER_S[request["device"]], checkpoint.save_and_exit, [0]).start()
    if request["device"] == "cpu":
        # In C, without Python's lock, as in mx.eval.
        ctypes.CDLL(None).sleep(600)
        return
    kernel: Any = mx.fast.cuda_kernel("never_ends", ["own"], ["out"], _NEVER_ENDS)
    single: Any = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    mx.eval(kernel(inputs=[mx.zeros(1)], stream=mx.new_stream(mx.gpu), **single))


def saved(request: Answer) -> Iterator[Answer]:
    """The state that `hang` has saved is there, bit for bit."""
    (path,) = Path(request["folder"]).glob("emergency/1/rank0/step-*")
    found, state = store.load(store.verify(path))["weights"], _state(request)
    same = found.keys() == state.keys()
    yield {"same": same and all(bool(mx.array_equal(found[name], value)) for name, value in state.items())}


def _state(request: Answer) -> dict[str, mx.array]:
    """64 MiB, computed on the device."""
    mx.set_default_device(mx.cpu if request["device"] == "cpu" else mx.gpu)
    kinds = {"float32": mx.float32, "bfloat16": mx.bfloat16}
    state = {name: (mx.arange(2**24 // kind.size) % 1000).astype(kind) for name, kind in kinds.items()}
    state |= {f"another {name}": value * 2 for name, value in state.items()}
    mx.eval(state)
    return state


if __name__ == "__main__":
    sys.exit(answer_request({"trainings": trainings, "models": models, "hang": hang, "saved": saved}))
