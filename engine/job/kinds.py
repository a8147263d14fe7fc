"""The kinds of a job: a training of ours in step, one that averages now and then, an elastic torchrun on each node, any
other command, or a task on what another run has trained. Each says what a run of it may lose, who reports, what hangs,
what a loss triggers, how it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final

from engine.job.traits import FRAMEWORKS, STRATEGY_TRAITS, FrameworkTraits, StrategyTraits
from engine.protocol.attempt import ExitRecord
from engine.protocol.job import Framework, Strategy
from engine.protocol.task import TaskKind

OWN_STATE = "a program of the user's own has its own state ([recovery] restart_commands is false)"


@dataclass(frozen=True)
class RankSeen:
    """One rank of a running attempt, as far as its loss is concerned."""

    started: bool = False
    ended: bool = False
    failed: bool = False
    """It ended, and has not done its work."""
    gave_up: bool = False
    """It ended by itself, with an exit code that is not 0."""


@dataclass(frozen=True)
class RanksSeen:
    ranks: Sequence[RankSeen]
    ends: Sequence[int] = ()
    """Ranks in the order in which their ends were recorded; the others that have ended follow."""
    stepped: bool = False
    """The training has made a step."""
    min_nodes: int | None = None
    """None: all."""


@dataclass(frozen=True)
class JobKind:
    """By default a training of ours whose ranks are in step."""

    framework: FrameworkTraits
    strategy: StrategyTraits
    reports = True
    """Every rank reports its steps, phases and end as events; else they are read from what a program prints."""
    any_rank_reports = False
    """Any one of the ranks may be the one that reports for all."""
    compared = True
    """That ranks differ is a fault."""
    outlives_ranks = False
    """The training goes on when a rank is lost, unless that is rank 0."""
    loss_restarts_workers = False
    """The keepers are to start their workers again, without a node that is lost: they do not notice it themselves."""
    own_model: ClassVar[str | None] = None
    """Why neither its model nor its data are known; None where they are."""
    first_steps = 5
    """They may take longer than all others: nothing is compiled or cached yet."""
    signs: ClassVar[tuple[str, ...]] = ("step",)
    """By which a person sees that it goes on; none where it may wait for as long as it likes."""
    trains = True
    """Else it uses what another run has trained."""
    generates = False
    """Its ranks have some layers each of a model that they generate with."""
    keeps_state = True
    """A restart goes on from a state that an earlier attempt saved; else it begins anew."""
    needless_checks: ClassVar[Mapping[str, str]] = {}
    """Checks of what it has no use for, by name → why it has none."""

    @property
    def survivors_keep_state(self) -> bool:
        """Ranks that lost another one can save all that a restart needs."""
        return self.reports and not self.strategy.partitioned

    def packages(self, words: Sequence[str]) -> tuple[str, ...]:
        """Those that every rank imports, the framework's own first. `words`: of the job's command."""
        return self.framework.packages + self.strategy.packages

    def watched_ranks(self, world_size: int) -> tuple[int, ...]:
        """The ranks without whose steps the attempt hangs."""
        return tuple(range(world_size))

    def success_ranks(self, world_size: int) -> range:
        """The ranks whose success is the attempt's."""
        return range(1 if self.outlives_ranks else world_size)

    def succeeded(self, record: ExitRecord | None, end: Mapping[str, Any] | None) -> bool:
        """A rank has done its work. `end`: its last event."""
        # Its keeper may have lost its lease, or been told to end it, while it left, or be gone itself.
        ended_well = record is None or record.code == 0 or (record.code is None and record.stopped_by is not None)
        return ended_well and end is not None and end.get("completed") is True

    def hangs(self, *, stepped: bool) -> bool:
        """Without a step for long. `stepped`: it has reported one."""
        return self.reports or stepped

    def hang_s(self, hang_s: float, stall_s: float) -> float:
        """Seconds without a step that are a hang, by these two limits of [recovery]."""
        return hang_s

    def grace_s(self, stop_grace_s: float, save_grace_s: float) -> float:
        """Seconds that a rank may take for a cooperative stop, in the middle of a save at the worst."""
        return max(stop_grace_s, save_grace_s)

    def losable(self, seen: RanksSeen) -> frozenset[int]:
        """The ranks that the others go on without, or would."""
        return frozenset()

    def rank_restarts(self, rank: int, max_restarts: int) -> int:
        """How often a node starts its rank again while the others go on."""
        return 0

    def prints_metrics(self, rank: int) -> bool:
        """The rank's node reads them from what it prints."""
        return False

    def why_never_restarted(self, *, restart_commands: bool, nothing_ran: bool) -> str | None:
        """None where another attempt may follow. `nothing_ran`: the failed one could not be launched, by chance."""
        return None

    def starts_directly(self, launcher: str) -> bool:
        """Without mlx.launch, which ends all ranks when one has ended. `launcher`: of [cluster]."""
        return launcher == "direct" or self.outlives_ranks or not self.framework.by_mlx_launch

    def torchrun(self, nodes: int, min_nodes: int | None, max_restarts: int) -> dict[str, str | int]:
        """Options of the torchrun that each rank is; none where it is none."""
        return {}

    def state_needs_all(self, nodes: int, *, local_checkpoints: bool) -> bool:
        """Each of `nodes` has a part of the training state that exists nowhere else, so that no restart can do without
        it. `local_checkpoints`: on each rank's node alone."""
        return self.reports and self.strategy.partitioned and local_checkpoints and nodes > 1


class Lockstep(JobKind):
    """A training of ours, every step of which takes all ranks."""


class ResultTask(JobKind):
    """Every rank of ours takes what another run has trained, to measure it or to fuse it, and trains nothing."""

    compared = False
    signs = ()
    trains = False
    keeps_state = False
    needless_checks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("pre_rdma_sync", "checkpoint_layer", "performance_layer"), "nothing is trained"
    )


class TextGeneration(ResultTask):
    """It answers prompts, or serves until it is stopped."""

    generates = True
    needless_checks: ClassVar[Mapping[str, str]] = {**ResultTask.needless_checks, "data_matches": "no data is read"}


class Benchmark(TextGeneration):
    """It does tasks of lm-eval, which has its own data."""

    def packages(self, words: Sequence[str]) -> tuple[str, ...]:
        return (*super().packages(words), "lm_eval")


class PeriodicAveraging(JobKind):
    """A training of ours, each rank by itself from one averaging of the weights to the next, which rank 0 makes."""

    compared = False
    outlives_ranks = True

    def watched_ranks(self, world_size: int) -> tuple[int, ...]:
        return (0,)

    def rank_restarts(self, rank: int, max_restarts: int) -> int:
        return max_restarts if rank else 0

    def losable(self, seen: RanksSeen) -> frozenset[int]:
        # Until the first update every rank is needed.
        return frozenset(number for number, rank in enumerate(seen.ranks) if number and rank.started and seen.stepped)


class OwnCommand(JobKind):
    """A program of the user's own on every rank. It does not report when it loads, validates or saves."""

    reports = False
    signs = ("output", "step")
    own_model = "the job runs a command of its own, which brings its own model and data"
    first_steps = 0

    def packages(self, words: Sequence[str]) -> tuple[str, ...]:
        return self.framework.command_packages + self.framework.launcher_packages(words, self.strategy.name)

    def watched_ranks(self, world_size: int) -> tuple[int, ...]:
        # It alone reports.
        return (0,)

    def prints_metrics(self, rank: int) -> bool:
        return rank == 0

    def succeeded(self, record: ExitRecord | None, end: Mapping[str, Any] | None) -> bool:
        # One that was told to end has not done its work.
        return record is not None and record.code == 0 and record.stopped_by is None

    def hang_s(self, hang_s: float, stall_s: float) -> float:
        return max(hang_s, stall_s)

    def grace_s(self, stop_grace_s: float, save_grace_s: float) -> float:
        return 0.0

    def why_never_restarted(self, *, restart_commands: bool, nothing_ran: bool) -> str | None:
        return None if restart_commands or (nothing_ran and self.framework.picks_port) else OWN_STATE


class AveragingCommand(PeriodicAveraging, OwnCommand):
    """A program of the user's own whose ranks go on without one another, as it does with strategy `local`."""


class ElasticTorchrun(OwnCommand):
    """One torchrun on each node, which is a rank here. Each starts workers, of which any may report."""

    any_rank_reports = True
    compared = False
    outlives_ranks = True
    loss_restarts_workers = True

    def watched_ranks(self, world_size: int) -> tuple[int, ...]:
        return tuple(range(world_size))

    def losable(self, seen: RanksSeen) -> frozenset[int]:
        """All but rank 0, as long as the least number remains, or once rank 0 has done its work. One whose torchrun
        gave up before that is none of them: it has closed the rendezvous, and all others end with it."""
        ranks, by_end = seen.ranks, {number: place for place, number in enumerate(seen.ends)}
        if ranks[0].ended and not ranks[0].failed:
            return frozenset(range(1, len(ranks)))
        spare, lost, losable = len(ranks) - (seen.min_nodes or len(ranks)), 0, set[int]()
        for number in sorted(range(len(ranks)), key=lambda n: (not ranks[n].ended, by_end.get(n, len(ranks)))):
            rank = ranks[number]
            if number and rank.started and not rank.gave_up and lost < spare:
                losable.add(number)
                lost += rank.failed
        return frozenset(losable)

    def torchrun(self, nodes: int, min_nodes: int | None, max_restarts: int) -> dict[str, str | int]:
        # The least and the most nodes.
        return {"--nnodes": f"{min_nodes or nodes}:{nodes}", "--max-restarts": max_restarts}

    def prints_metrics(self, rank: int) -> bool:
        return True


TASKS: Final[dict[TaskKind, type[JobKind]]] = {
    "evaluate": ResultTask,
    "lm_eval": Benchmark,
    "fuse": ResultTask,
    "generate": TextGeneration,
    "serve": TextGeneration,
}


@cache
def job_kind(
    framework: Framework, strategy: Strategy, *, command: bool, elastic: bool, task: TaskKind | None = None
) -> JobKind:
    """`command`: the job runs a program of the user's own."""
    if task is not None:
        kind = TASKS[task]
    elif elastic:
        kind = ElasticTorchrun
    elif strategy == "local":
        kind = AveragingCommand if command else PeriodicAveraging
    else:
        kind = OwnCommand if command else Lockstep
    return kind(FRAMEWORKS[framework], STRATEGY_TRAITS[strategy])
