"""How long a rank waits for others, and for what they exchange, in the middle of its passes and of the update.

On the CPU. A GPU's collectives run beside the program, which goes on without waiting: there it is all computation."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class WaitTimer:
    """Made once in a process."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._waited_s = 0.0
        self._device = device
        self._last_bucket_at: float | None = None
        if device.type != "cpu":
            return
        # Of FSDP and DeepSpeed, which wait in Python.
        wait = dist.Work.wait

        def timed(work: dist.Work, *arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return wait(work, *arguments)
            finally:
                self._waited_s += time.perf_counter() - started

        dist.Work.wait = timed
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._exchange)

    # PyTorch checks the annotations, which must not be strings.
    def _exchange(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The exchange of DDP itself. Its last bucket is ready when the backward pass has computed everything."""
        if bucket.is_last():
            self._last_bucket_at = time.perf_counter()
        return allreduce_hook(state, bucket)

    def take(self) -> float:
        """The seconds since the last call; called at the end of each backward pass and of the update."""
        if self._device.type == "cuda":
            # The program is ahead of the GPU: what is timed here would be counted where it next waits.
            torch.cuda.synchronize(self._device)
        waited, self._waited_s = self._waited_s, 0.0
        if self._last_bucket_at is not None:
            waited += time.perf_counter() - self._last_bucket_at
            self._last_bucket_at = None
        return waited
