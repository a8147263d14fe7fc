"""The PyTorch trainer, for the built-in fine-tuning and for tasks on its result: `python -m engine.torch_trainer.main`.

PyTorch is imported late: it takes seconds, in which a stop is already heard and a wrong specification reported."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from engine.training.process import TrainingProcess, run_rank
from engine.training.reporting import PeerLost

if TYPE_CHECKING:
    from engine.torch_trainer.train import TorchLoop

_LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited", re.IGNORECASE)
"""gloo's and NCCL's messages on the ranks that lose another one."""
_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
_M_MMAP_THRESHOLD = -3
"""mallopt(3)'s number for the same."""
_THRESHOLD_BYTES = 2**20


def main() -> NoReturn:
    code = run_rank(_run)
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own end now and then aborts a rank that has completed, by a thread of the group that is still
    # there: "terminate called without an active exception".
    os._exit(code)


def _run(process: TrainingProcess) -> None:
    trainer = import_trainer(process.spec.backend)
    if process.spec.task is not None:
        from engine.torch_trainer import result_tasks as trainer
    try:
        trainer.run(process)
    except RuntimeError as error:
        if _LOST_PEER.search(str(error)):
            raise PeerLost(str(error)) from error
        raise


def load_training(process: TrainingProcess) -> TorchLoop:
    """As `train.load_training`."""
    loop: TorchLoop = import_trainer(process.spec.backend).load_training(process)
    return loop


def import_trainer(backend: str) -> ModuleType:
    """engine.torch_trainer.train, in a process set up for it."""
    hide_gpus(backend)
    if (local := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
        # Each rank would else have a thread for every core. Over gloo it computes there.
        threads = max(1, (os.cpu_count() or 1) // local) if backend == "gloo" else 1
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if backend == "gloo":
        return_freed_tensors()
    # DeepSpeed and Accelerate call functions that PyTorch has renamed.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    gc.disable()
    from engine.torch_trainer import train

    # What the imports have made stays: no collection looks through it, not the one at the end either.
    gc.freeze()
    gc.enable()
    return train


def hide_gpus(backend: str) -> None:
    """Before PyTorch is imported. With gloo, Accelerate and DeepSpeed would else take a GPU that is there."""
    if backend == "gloo":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def return_freed_tensors() -> None:
    """Give the memory of a freed tensor back to the system. glibc's heap would keep it, FSDP's gathered parameters
    above all; the price is some of the speed. MALLOC_MMAP_THRESHOLD_ in the environment wins."""
    # musl and macOS have no mallopt.
    with contextlib.suppress(AttributeError):
        if _MMAP_THRESHOLD not in os.environ:
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)


if __name__ == "__main__":
    main()
