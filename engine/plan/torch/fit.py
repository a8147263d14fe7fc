"""The settings of a PyTorch job that it leaves to the plan, the memory that each rank needs with them, and the changes
with which a job that is too large would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from engine.errors import InputError, memory_text
from engine.models import NvidiaGpu
from engine.plan.context import PlanContext
from engine.plan.document import OVERRIDE, ChosenTorchSettings, Disabled, RankMemory, Rationale, Source, WayOut
from engine.plan.memory.choice import with_settings
from engine.plan.memory.estimate import largest_batch
from engine.plan.memory.fit import (
    MemoryFit,
    memory_section,
    model_shape,
    rank_memory,
    refuse_memory,
    unknown_memory,
    workload_of,
)
from engine.plan.memory.shape import ModelShape
from engine.plan.memory.ways_out import (
    adapters,
    describe_ways,
    fewer_sequences,
    first_of_each,
    powers_of_two,
    settings_text,
    shorter_sequences,
)
from engine.plan.torch.memory import TorchWorkload, torch_estimate, torch_estimates
from engine.plan.torch.strategy import (
    StrategyChoice,
    candidates,
    choose_precision,
    choose_strategy,
    label,
)
from engine.protocol.job import AUTO
from engine.protocol.launchers import MIXED_PRECISIONS, option_value, own_strategy, split_launcher

_KEYS = ("strategy", "sharding", "zero_stage", "offload", "grad_checkpoint")
_OF_STRATEGY = {"ddp": (), "fsdp": ("sharding", "offload"), "deepspeed": ("zero_stage", "offload")}
"""The keys that a strategy has besides."""
_MOST_RANKS = 64


@dataclass(frozen=True)
class TorchFit(MemoryFit):
    """With what the section of the plan derives from it."""

    on_gpu: bool = False
    gpus: tuple[NvidiaGpu | None, ...] = ()
    """Each rank's; None where it is not known, () on the CPU."""
    choice: StrategyChoice | None = None
    """None where the memory cannot be estimated."""
    compared: StrategyChoice | None = None
    """All strategies, whatever the job asks for, with the same precision and recomputation."""

    @property
    def chosen(self) -> ChosenTorchSettings:
        """The defaults where they are the script's own."""
        return self.settings if isinstance(self.settings, ChosenTorchSettings) else ChosenTorchSettings()


def torch_fit(context: PlanContext) -> TorchFit:
    """Choose what is "auto", estimate every rank, and refuse a job that does not fit."""
    on_gpu, places = context.backend == "nccl", [_place(context, rank) for rank in range(context.ranks)]
    gpus = tuple(place.gpu for place in places) if on_gpu else ()
    if (reason := _scripts_own(context)) is not None:
        context.explain("settings", Source.USER, reason)
        memory = unknown_memory(context, InputError("the job runs a custom command"))
        return TorchFit(memory, Disabled(reason=reason), on_gpu=on_gpu, gpus=gpus)
    asked = _requested(context)
    precision = _precision(context, asked["precision"], gpus)
    try:
        if not context.job.kind.trains:
            raise InputError("nothing is trained: each rank sees itself whether it has room for the model")
        shape = model_shape(context)
        job = _Job(shape, _workloads(context, on_gpu), places)
        options = job.options(asked, precision)
        if not options:
            context.refuse(
                "strategy", _contradiction(asked, on_gpu=on_gpu), todo='set strategy = "auto", or remove one of them'
            )
            asked = {**asked, **dict.fromkeys(("strategy", "sharding", "zero_stage", "offload"), AUTO)}
            options = job.options(asked, precision)
        choice = job.choose(options)
    except InputError as error:
        settings = _unestimated(asked | {"precision": precision}, error, context)
        return TorchFit(unknown_memory(context, error), settings, on_gpu=on_gpu, gpus=gpus)
    chosen = choice.chosen.settings
    _explain(asked, choice, context)
    rows, short = _rows(context, job, chosen)
    ways: tuple[WayOut, ...] = ()
    if context.seeks_ways_out and choice.chosen.fits is False:
        ways = _ways_out(job, asked, precision, context)
    refuse_memory(rows, ways, context)
    if short:
        context.refuse("memory", "; ".join(short), OVERRIDE, describe_ways(ways))
    trained = choice.chosen.memory.trainable_parameters
    section = memory_section(shape, trained, [_assumption(context, chosen)], rows, ways)
    open_to_choice = {**dict.fromkeys(_KEYS, AUTO), "grad_checkpoint": chosen.grad_checkpoint}
    compared = job.choose(job.options(open_to_choice, precision, all_of_them=True))
    most = job.largest_batch(chosen)
    return TorchFit(section, chosen, largest_batch=most, on_gpu=on_gpu, gpus=gpus, choice=choice, compared=compared)


def _scripts_own(context: PlanContext) -> str | None:
    """Where a job's own command has its strategy and precision from; None if the launch gives it those of [job]."""
    if context.job.command is None:
        return None
    if (option := own_strategy(context.job.command)) is not None:
        return f"strategy and precision are those of the command's {option}"
    launcher = split_launcher(context.job.command)[0]
    if launcher == "accelerate" and "precision" in context.job.mlx_lm:
        return None
    return "strategy and precision are the script's own"


def _precision(context: PlanContext, asked: str, gpus: Sequence[NvidiaGpu | None]) -> str:
    on_gpu = context.backend == "nccl"
    if asked == AUTO:
        precision, reason = choose_precision(gpus, on_gpu=on_gpu)
        context.explain("settings.precision", Source.FACT if on_gpu else Source.RULE, reason)
        return precision
    context.explain("settings.precision", Source.USER, "the job sets it")
    if asked == "fp16" and context.backend == "gloo":
        why = "precision = fp16 needs a GPU: on the CPU Accelerate computes in float32, and says nothing"
        todo = 'set precision = "auto", or backend = "nccl" in [cluster]'
        if all(node.name in context.facts for node in context.config.nodes):
            context.refuse("precision", why, todo=todo)
        else:
            context.warn("precision", f"{why}; {todo}")
    return asked


def _requested(context: PlanContext) -> dict[str, Any]:
    settings, strategy = context.job.mlx_lm, context.strategy
    asked = {key: settings.get(key, AUTO) for key in (*_KEYS, "precision", "nvme_path")}
    if asked["offload"] == AUTO and context.config.checkpoint.enabled and context.job.command is None:
        # Of what is offloaded there, there is no checkpoint.
        asked["nvme_path"] = None
    # A layer count is MLX's alone.
    given = settings.get("grad_checkpoint", False)
    asked |= {"strategy": strategy, "grad_checkpoint": given if given == AUTO else bool(given)}
    named = option_value(context.job.command, "--mixed_precision")
    return asked | ({"precision": MIXED_PRECISIONS[named]} if named in MIXED_PRECISIONS else {})


class _RankLimits(NamedTuple):
    """Where a rank runs, with limits in bytes."""

    gpu: NvidiaGpu | None
    """None where it is not known, and on the CPU."""
    limit: int | None
    limit_from: str
    host_limit: int | None
    """Its part of its machine's memory."""


def _place(context: PlanContext, rank: int) -> _RankLimits:
    hosts = [node.ssh for node in context.config.nodes]
    facts = context.facts.get(context.names[rank])
    memory = facts.memory_total_bytes if facts is not None else None
    host_limit = memory and memory // hosts.count(hosts[rank])
    if context.backend != "nccl":
        part, unknown = "the rank's part of the machine's memory", "the node did not report its memory"
        return _RankLimits(None, host_limit, unknown if host_limit is None else part, host_limit)
    gpus, number = facts.gpus if facts is not None else (), hosts[:rank].count(hosts[rank])
    gpu = gpus[number] if number < len(gpus) else None
    if gpu is not None and gpu.mig:
        divided = "the GPU is divided (MIG), and the memory of the rank's part is not known"
        return _RankLimits(gpu, None, divided, host_limit)
    limit = gpu.memory_bytes if gpu is not None else None
    return _RankLimits(gpu, limit, "the GPU was not reported" if limit is None else "the GPU's memory", host_limit)


def _workloads(context: PlanContext, on_gpu: bool) -> tuple[TorchWorkload, ...]:
    settings, shared = context.settings, workload_of(context)
    optimizer = str(settings["optimizer"])
    momentum = ((settings.get("optimizer_config") or {}).get("sgd") or {}).get("momentum", 0)
    sequences, length = max(context.steps, key=lambda step: step[0] * step[1])
    even = max(1, -(-sequences // context.ranks))
    common = TorchWorkload(
        **{**asdict(shared), "lora_keys": shared.lora_keys or None, "sequence": length},
        moments=2 if optimizer.startswith("adam") else 1 if momentum else 0,
        on_gpu=on_gpu,
    )
    micro = (context.micro_batches or {}) if context.budget is None else {}
    return tuple(replace(common, batch=micro.get(name, even)) for name in context.names)


@dataclass(frozen=True)
class _Job:
    shape: ModelShape
    workloads: tuple[TorchWorkload, ...]
    places: Sequence[_RankLimits]

    def options(
        self, asked: Mapping[str, Any], precision: str, *, all_of_them: bool = False
    ) -> list[ChosenTorchSettings]:
        ranks, on_gpu = max(2 if all_of_them else 1, len(self.workloads)), self.workloads[0].on_gpu
        return candidates(asked, precision, self.shape.total_parameters, ranks=ranks, on_gpu=on_gpu)

    def choose(self, options: Sequence[ChosenTorchSettings]) -> StrategyChoice:
        limits, host_limits = [place.limit for place in self.places], [place.host_limit for place in self.places]
        return choose_strategy(self.shape, self.workloads, limits, options, host_limits)

    def largest_batch(self, chosen: ChosenTorchSettings) -> int | None:
        limits = [place.limit for place in self.places]
        sizes = [
            largest_batch(torch_estimates(self.shape, with_settings(workload, chosen)), limit)
            for workload, limit in set(zip(self.workloads, limits, strict=True))
            if limit is not None
        ]
        return min(sizes) if None not in limits else None


def _unestimated(asked: Mapping[str, Any], why: InputError, rationale: Rationale) -> ChosenTorchSettings:
    """The job's settings, and the defaults for what it leaves open."""
    given = {key: asked[key] for key in ChosenTorchSettings.model_fields if asked[key] != AUTO}
    if asked["strategy"] == AUTO:
        rationale.explain("settings.strategy", Source.DEFAULT, f"DDP, since the memory is not known: {why}")
    else:
        rationale.explain("settings.strategy", Source.USER, "the job sets it")
    return ChosenTorchSettings.model_validate(given)


def _contradiction(asked: Mapping[str, Any], *, on_gpu: bool) -> str:
    given = ", ".join(f"{key} = {asked[key]}" for key in _KEYS[:4] if asked[key] != AUTO)
    offloads = "fsdp to the cpu alone" if on_gpu else "fsdp from a GPU alone"
    return f"{given} do not go together: ddp offloads nothing, {offloads}, and only ZeRO-3 to nvme"


def _explain(asked: Mapping[str, Any], choice: StrategyChoice, context: PlanContext) -> None:
    chosen = choice.chosen.settings
    reasons = dict.fromkeys(("strategy", *_OF_STRATEGY[chosen.strategy]), choice.reason)
    reasons["grad_checkpoint"] = f"{'else the activations do not' if chosen.grad_checkpoint else 'the activations'} fit"
    for key, reason in reasons.items():
        context.explain_setting(key, asked[key], reason)


def _rows(context: PlanContext, job: _Job, chosen: ChosenTorchSettings) -> tuple[list[RankMemory], list[str]]:
    """The ranks, and which of their machines have too little memory."""
    rows, short = [], []
    for node, workload, place in zip(context.names, job.workloads, job.places, strict=True):
        memory = torch_estimate(job.shape, with_settings(workload, chosen))
        host_need = f", and {memory_text(memory.host_bytes)} of the machine's memory {memory.host_use}"
        need = f"{memory_text(memory.needed_bytes)} with the reserve{host_need if memory.host_bytes else ''}"
        how = f"{workload.batch} × {workload.sequence:,} tokens, from config.json: {label(chosen)}, {chosen.precision}"
        context.explain(f"memory.{node}", Source.RULE, f"{need}, {how}; limit: {place.limit_from}")
        if place.host_limit is not None and memory.host_bytes > place.host_limit:
            needs = f"{memory_text(memory.host_bytes)} of {memory_text(place.host_limit)}"
            short.append(f"{node} needs {needs} of its machine's memory {memory.host_use}")
        rows.append(rank_memory(memory, node, (place.limit, place.limit_from), "estimate"))
    return rows, short


def _assumption(context: PlanContext, chosen: ChosenTorchSettings) -> str:
    kind = context.job.fine_tune_type
    trained = (
        "float32 trained weights" if chosen.strategy != "deepspeed" else f"{chosen.precision} weights, float32 masters"
    )
    return f"{kind}, {trained}, {chosen.precision} computation, float32 moments, fused attention, {label(chosen)}"


def _ways_out(job: _Job, asked: Mapping[str, Any], precision: str, context: PlanContext) -> tuple[WayOut, ...]:
    """The smallest change of each kind with which every rank fits, those that leave the training as it is first."""

    def attempt(change: str, tried: _Job, requested: Mapping[str, Any], freed: Sequence[str] = ()) -> Iterator[WayOut]:
        """`freed`: the keys of `requested` that are chosen, which the change then names."""
        options = tried.options(requested, precision)
        chosen = tried.choose(options).chosen if options else None
        if chosen is not None and chosen.fits:
            named = freed if len(freed) < 2 else list(_differing(chosen.settings, asked))
            change = change or settings_text(chosen.settings, named)
            yield WayOut(change=change, needed_bytes=chosen.memory.needed_bytes)

    def settings() -> Iterator[WayOut]:
        fixed = [key for key in _KEYS if asked[key] != AUTO]
        for keys in filter(None, (*([key] for key in fixed), fixed)):
            yield from attempt("", job, {**asked, **dict.fromkeys(keys, AUTO)}, keys)

    def changed(changes: Iterable[tuple[str, Sequence[TorchWorkload]]]) -> Iterator[WayOut]:
        for change, workloads in changes:
            yield from attempt(change, replace(job, workloads=tuple(workloads)), asked)

    def more_ranks() -> Iterator[WayOut]:
        free = {**asked, **dict.fromkeys(_KEYS, AUTO)}
        batch = sum(workload.batch for workload in job.workloads)
        for ranks in powers_of_two(_MOST_RANKS):
            if ranks > len(job.workloads):
                one = replace(job.workloads[0], world_size=ranks, batch=-(-batch // ranks))
                larger = _Job(job.shape, (one, one), (job.places[0],) * 2)
                yield from attempt(f"{ranks} ranks like {context.names[0]}", larger, free)

    fewer = changed(fewer_sequences(job.workloads, context.settings))
    shorter, lora = changed(shorter_sequences(job.workloads)), changed(adapters(job.workloads))
    return tuple(first_of_each((settings(), fewer, shorter, lora, more_ranks())))


def _differing(chosen: ChosenTorchSettings, asked: Mapping[str, Any]) -> Iterator[str]:
    for key in ("strategy", *_OF_STRATEGY[chosen.strategy], "grad_checkpoint"):
        if getattr(chosen, key) != asked[key]:
            yield key
