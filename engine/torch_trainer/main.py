"""The PyTorch trainer, the built-in recipe for fine-tuning: `python -m engine.torch_trainer.main`.

PyTorch is imported late: it takes seconds, in which a stop is already heard and a wrong specification reported.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from typing import NoReturn

from engine.training.process import TrainingProcess, run_rank


def main() -> NoReturn:
    code = run_rank(_run)
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own end now and then aborts a rank that has completed, by a thread of the group that is still
    # there: "terminate called without an active exception".
    os._exit(code)


def _run(process: TrainingProcess) -> None:
    hide_gpus(process.spec.backend)
    # DeepSpeed and Accelerate call functions that PyTorch has renamed.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    from engine.torch_trainer.train import train

    # What the imports have made stays: no collection looks through it, not the one at the end either.
    gc.freeze()
    gc.enable()
    train(process)


def hide_gpus(backend: str) -> None:
    """Before PyTorch is imported. With gloo, Accelerate and DeepSpeed would else take a GPU that is there."""
    if backend == "gloo":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


if __name__ == "__main__":
    main()
