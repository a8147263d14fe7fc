"""The plan's torch section: the strategies side by side, and what the tools of PyTorch take."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.errors import spans
from engine.plan import network
from engine.plan.context import PlanContext
from engine.plan.document import Disabled, Source, TorchCandidate, TorchSection
from engine.plan.torch.files import JOB, Machine, TorchLaunch, commands, files, manifests
from engine.plan.torch.fit import TorchFit
from engine.plan.torch.strategy import BLOCKS, label
from engine.protocol.job import BUCKET_ELEMENTS
from engine.protocol.launchers import idle_options, joined_options, split_launcher, started_program
from engine.security.identifiers import SshTarget
from engine.security.redact import is_public

_PLACEHOLDER = re.compile(r"\{(?:rank|workdir|model|data|python)\}")
_RECIPE = "engine.torch_trainer.standalone"
_CPU_FSDP = "Accelerate replaces FSDP by DDP on the CPU without a word: the recipe calls fully_shard itself"
_SAVED = {
    "ddp": "torch.distributed.checkpoint, one file for each rank; trained weights as safetensors",
    "fsdp": "torch.distributed.checkpoint, sharded: each rank writes its part; trained weights as safetensors",
    "deepspeed": "DeepSpeed's, sharded: each rank writes its part; trained weights as safetensors",
}


def torch_section(context: PlanContext, fit: TorchFit) -> TorchSection:
    chosen = fit.chosen
    launch = _launch(context, fit)
    written = files(launch)
    (pasted, notes), (manifest, needed) = commands(launch), manifests(launch, written)
    notes = (*notes, *needed, *_command_notes(context))
    hosts = context.network.hosts if context.network is not None else ()
    if not fit.on_gpu and (unprobed := _unprobed(context)):
        notes = (*notes, f"{spans(unprobed)}: not probed, a GPU for each rank is assumed; flightdeck nodes probes")
    scripts_own = fit.settings.reason if isinstance(fit.settings, Disabled) else None
    notes = (*notes, scripts_own) if scripts_own is not None else notes
    if context.settings and chosen.strategy == "fsdp" and not fit.on_gpu:
        notes = (*notes, _CPU_FSDP)
    section = TorchSection(
        strategy=chosen.strategy if scripts_own is None else None,
        precision=chosen.precision if scripts_own is None else None,
        on_gpu=fit.on_gpu,
        gpus={name: gpu.name if gpu else None for name, gpu in zip(context.names, fit.gpus, strict=False)},
        candidates=_candidates(fit),
        gradient_accumulation_steps=context.accumulation if context.settings else None,
        wrap_classes=launch.blocks if chosen.strategy == "fsdp" else (),
        prefetch=_prefetch(fit) if scripts_own is None else "the script's own",
        activation_checkpointing=chosen.grad_checkpoint if context.settings else None,
        checkpoint_format=_SAVED[chosen.strategy] if context.settings else "the script's own",
        backend=context.backend,
        interfaces={name: host.interface for name, host in zip(context.names, hosts, strict=False)},
        infiniband=context.network is not None and context.network.infiniband,
        files=written | manifest,
        commands=pasted,
        notes=notes,
    )
    _explain(context, section)
    return section


def _launch(context: PlanContext, fit: TorchFit) -> TorchLaunch:
    job, recovery = context.job, context.config.recovery
    nodes = context.config.nodes
    counts = Counter[SshTarget]()
    for node in nodes:
        counts[SshTarget.parse(node.ssh)] += node.processes
    first, paths = next(iter(counts)), {"model": nodes[0].model or job.model, "data": nodes[0].data or job.data}
    memory = [fit.choice.chosen.memory] if fit.choice is not None else []
    needed = [estimated.host_bytes if fit.on_gpu else estimated.needed_bytes for estimated in memory]
    name = socket.gethostname() if first.local else first.host
    plan, command = context.network, [*job.shown_command]
    launcher, options, _ = split_launcher(command)
    started = started_program(command) if command else ["python", "-m", _RECIPE, JOB]
    return TorchLaunch(
        name=job.name,
        settings=fit.chosen,
        machines=tuple(Machine(str(replace(host, port=None)), count, host.port) for host, count in counts.items()),
        program=tuple(_program(started)),
        address=plan.hosts[0].ips[0] if plan is not None and plan.hosts and plan.hosts[0].ips else name,
        on_gpu=fit.on_gpu or bool(_unprobed(context)),
        environment=_environment(context),
        secrets=tuple(name for name in job.env if not is_public(name)),
        inputs={name: path for name, path in paths.items() if path is not None},
        memory_bytes=needed[0] * max(counts.values()) if needed else None,
        blocks=BLOCKS.get(str((context.model or {}).get("model_type", "")), ()),
        micro_batch=max(context.micro_batches.values()) if context.micro_batches else None,
        accumulation=context.accumulation,
        max_grad_norm=context.settings.get("max_grad_norm"),
        nvme_path=job.mlx_lm.get("nvme_path"),
        planned=not isinstance(fit.settings, Disabled),
        launcher=launcher,
        options=tuple(option for option in joined_options(options) if option != "--module"),
        elastic=str(context.config.torchrun.get("--nnodes", "")),
        restarts=recovery.max_restarts,
        job=_resolved(context, fit) if context.settings else None,
    )


def _unprobed(context: PlanContext) -> list[str]:
    """The nodes of which nothing is known, if the others have a GPU for each rank."""
    config = context.config
    probed = {name: fact for name, fact in context.facts.items() if fact.problem is None}
    wanted = {node.name: network.ranks_of_host(config, node.ssh) for node in config.nodes}
    lacking = any(len(probed[name].gpus) < ranks for name, ranks in wanted.items() if name in probed)
    return [] if lacking or config.cluster.backend != "auto" else [name for name in wanted if name not in probed]


def _program(started: Sequence[str]) -> list[str]:
    """The words after a launcher, which starts python itself, but without python's own options."""
    python = started[0] in ("python", "python3") and len(started) > 1
    if python and (started[1] == "-m" or not started[1].startswith("-")):
        return list(started[1:])
    # All three know it so; DeepSpeed knows no --no-python.
    return ["--no_python", *started]


def _command_notes(context: PlanContext) -> Iterator[str]:
    """How a job's own command differs here from what a launch starts."""
    command = context.job.command
    if command is None:
        return
    if context.job.shown_command != tuple(command):
        yield "the command's credentials are left out: it does not run as it is shown"
    if placeholders := sorted(set(_PLACEHOLDER.findall(" ".join(command)))):
        yield f"{', '.join(placeholders)} in the command: flightdeck launch alone fills this in for each rank"
    yield from idle_options(command)
    yield "the script's own batch, accumulation and checkpoints count: the files have only what is known"


def _environment(context: PlanContext) -> Mapping[str, str]:
    """The variables of all ranks alike: NCCL's, the job's own, and the interface if all machines call it the same."""
    plan, variables = context.network, dict[str, str]()
    if plan is not None and len({host.ssh for host in plan.hosts}) > 1:
        names = {host.interface for host in plan.hosts}
        name = names.pop() if len(names) == 1 else None
        if name is not None:
            # gloo also beside nccl, for what is on the CPU.
            variables |= {f"{kind.upper()}_SOCKET_IFNAME": name for kind in ("gloo", plan.backend)}
        if plan.backend == "nccl":
            variables |= network.nccl_environment(infiniband=plan.infiniband, gradient_bytes=None)
    return variables | {name: text for name, text in context.job.env.items() if is_public(name)}


def _resolved(context: PlanContext, fit: TorchFit) -> dict[str, Any]:
    """The job's keys as the trainer reads them, with each "auto" resolved."""
    job, options = context.job, context.config.data.options
    named = {"model": job.model, "data": job.data, "fine_tune_type": job.fine_tune_type, "framework": "torch"}
    of_data = {"data_options": options} if options else {}
    # With batch_tokens the context's batch_size is the mean.
    given = {key: value for key, value in context.settings.items() if context.budget is None or key != "batch_size"}
    return {**given, **named, **of_data, **dict(fit.chosen), "chunking": job.chunking, "chunk_size": job.chunk_size}


def _candidates(fit: TorchFit) -> tuple[TorchCandidate, ...]:
    """All strategies, and the chosen one if it is none of them."""
    if fit.choice is None or fit.compared is None:
        return ()
    chosen = fit.chosen
    tried = [*fit.compared.tried]
    tried += [fit.choice.chosen] if chosen not in [candidate.settings for candidate in tried] else []
    return tuple(
        TorchCandidate(
            name=label(candidate.settings),
            strategy=candidate.settings.strategy,
            sharding=candidate.settings.sharding if candidate.settings.strategy == "fsdp" else None,
            zero_stage=candidate.settings.zero_stage if candidate.settings.strategy == "deepspeed" else None,
            offload=candidate.settings.offload,
            needed_bytes=candidate.memory.needed_bytes,
            host_bytes=candidate.memory.host_bytes,
            fits=candidate.fits,
            chosen=candidate.settings == chosen,
        )
        for candidate in tried
    )


def _prefetch(fit: TorchFit) -> str:
    chosen = fit.chosen
    if chosen.strategy == "ddp":
        return "backward: gradients are reduced in buckets of 25 MiB beside it; forward: nothing to fetch"
    if chosen.strategy == "fsdp":
        kept = "the next block is gathered beside each block"
        back = kept if chosen.sharding == "full" else "nothing to gather, parameters are kept until then"
        return f"forward: {kept}; backward: {back}. FSDP2 does so by itself, and takes no setting for it"
    if chosen.zero_stage == 3:
        return f"both passes: up to {BUCKET_ELEMENTS // 4:,} parameters ahead (stage3_prefetch_bucket_size)"
    return f"backward: gradients are reduced in buckets of {BUCKET_ELEMENTS:,} beside it; forward: nothing to fetch"


def _explain(context: PlanContext, section: TorchSection) -> None:
    if section.gradient_accumulation_steps is not None:
        total, in_flight = context.total_batch, context.settings["batch_size"]
        given = Source.USER if context.given("grad_accumulation_steps") else Source.DEFAULT
        sizes = f"{total} sequences per update over {in_flight} in flight ({context.ranks} ranks)"
        rule = "batch_configuration.suggested has target batch / (batch per GPU · GPUs)"
        context.explain("torch.gradient_accumulation_steps", given, f"{sizes}; {rule}")
    if section.strategy == "fsdp":
        kind = (context.model or {}).get("model_type")
        why = f"the blocks of transformers' model_type {kind}" if section.wrap_classes else "the model names its blocks"
        context.explain("torch.wrap_classes", Source.RULE, why)
    if context.settings:
        context.explain("torch.prefetch", Source.RULE, "what is sent travels beside the computation")
        context.explain("torch.checkpoint_format", Source.RULE, "no rank has to gather the whole state to save it")
    plan = context.network
    source = Source.USER if context.config.cluster.backend != "auto" else Source.FACT
    context.explain("torch.backend", source, "; ".join(plan.reasons) if plan is not None else "not known")
    if section.infiniband:
        context.explain("torch.infiniband", Source.FACT, "every node has an active InfiniBand device")
