"""Traits of a job's framework and of its strategy, whatever else it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from engine.protocol.job import Framework, Strategy
from engine.protocol.launchers import split_launcher


@dataclass(frozen=True)
class FrameworkTraits:
    name: Framework
    title: str
    packages: tuple[str, ...]
    """Our trainer imports these, the one that has the backends first."""
    command_packages: tuple[str, ...]
    """A command may import these."""
    trainer: str
    """The module that each rank runs, of a training and of a task on its result."""
    undivided: Strategy
    """Every rank has the whole model."""
    adapters: str
    """The library whose adapters it trains."""
    tcp_backend: Literal["ring", "gloo"]
    by_mlx_launch: bool = True
    """mlx.launch can start its ranks, by a hostfile."""
    picks_port: bool = False
    """Rank 0 listens on a port that Flight Deck has chosen: that it was taken since says nothing of the program."""
    waits_busily: bool = True
    """A rank that waits for another one uses the CPU meanwhile."""
    compresses: bool = True
    """Its trainer compresses checkpoints as [checkpoint] says."""
    takes_launchers: bool = False
    """Flight Deck takes the place of PyTorch's launcher that a command begins with."""
    unserved: str | None = None
    """Why what it has trained is neither served, nor divided over the ranks of a task; None where it can be."""
    unmeasured: str | None = None
    """Why no node's step is measured alone; None where one is."""

    def launcher_packages(self, words: Sequence[str], strategy: Strategy) -> tuple[str, ...]:
        """Those of the launcher that a command begins with, which its ranks import too."""
        launcher, options, _ = split_launcher(words)
        if not self.takes_launchers or launcher not in ("accelerate", "deepspeed"):
            return ()
        by_accelerate = launcher == "accelerate" and (strategy == "deepspeed" or "--use_deepspeed" in options)
        return (launcher, "deepspeed") if by_accelerate else (launcher,)


MLX: Final = FrameworkTraits(
    "mlx", "MLX", ("mlx", "mlx-lm"), ("mlx", "mlx-lm"), "engine.trainer.main", "data", "mlx-lm", "ring"
)
TORCH: Final = FrameworkTraits(
    "torch",
    "PyTorch",
    ("torch", "accelerate", "transformers", "peft"),
    ("torch",),
    "engine.torch_trainer.main",
    "ddp",
    "peft",
    "gloo",
    by_mlx_launch=False,
    picks_port=True,
    waits_busily=False,
    compresses=False,
    takes_launchers=True,
    unserved="serving needs an MLX run: `flightdeck generate` answers",
    unmeasured="single nodes are measured with MLX alone: a PyTorch job has equal shares, unless [[node]] share sets "
    "them",
)
FRAMEWORKS: Final = {traits.name: traits for traits in (MLX, TORCH)}


@dataclass(frozen=True)
class StrategyTraits:
    name: Strategy
    partitioned: bool = False
    """Each rank has a part of the training state that no other rank has."""
    uncompared: str | None = None
    """Why the ranks' parameters are not compared while they train."""
    packages: tuple[str, ...] = ()
    """Beside the framework's."""
    least_ranks: int = 1
    divides_batch: bool = True
    """A rank computes its own sequences of a batch, and not all of them."""
    averages: bool = False
    """Each rank has its own weights between averagings, over a TCP connection of its own to rank 0."""


_NO_REPLICAS = "the state is partitioned, so there are no replicas to compare"
_NO_CHECKSUMS = "PyTorch's trainer compares the ranks' job, model and data once, before it trains"
STRATEGY_TRAITS: Final = {
    traits.name: traits
    for traits in (
        StrategyTraits("data"),
        StrategyTraits("sharded", True, _NO_REPLICAS),
        StrategyTraits("pipeline", True, _NO_REPLICAS, least_ranks=2, divides_batch=False),
        StrategyTraits("local", uncompared="the ranks' weights differ between averagings", averages=True),
        StrategyTraits("auto", uncompared=_NO_CHECKSUMS),
        StrategyTraits("ddp", uncompared=_NO_CHECKSUMS),
        StrategyTraits("fsdp", True, _NO_REPLICAS),
        StrategyTraits("deepspeed", True, _NO_REPLICAS, ("deepspeed",)),
    )
}
PARTITIONED: Final = tuple(name for name, traits in STRATEGY_TRAITS.items() if traits.partitioned)
