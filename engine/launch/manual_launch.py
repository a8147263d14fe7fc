"""The job's launch as a command line to run by hand: stock mlx.launch and stock mlx-lm, nothing of ours.

Each rank's shell picks its own line by MLX_RANK, since mlx.launch gives all ranks one program, while homes,
interpreters and paths differ."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.cluster.transport.base import quoted
from engine.config.job_table import apply_rate_rule
from engine.config.mlx_lm_keys import DEFAULTS, full_sequences, services
from engine.config.models import Config, NodeConfig, on_node
from engine.launch.hostfile import hostfile_document
from engine.launch.mlx_launch import arguments
from engine.launch.rank_environment import common_environment, gpu_environment
from engine.launch.start_script import exports
from engine.node.bootstrap import ROOT, node_root
from engine.plan.document import Launching, PlannedHostfile
from engine.plan.network import NetworkPlan
from engine.protocol.job import AUTO
from engine.protocol.partition import epoch_iterations
from engine.security.redact import is_public

STARTING_PORT = 32323
"""mlx.launch's own default."""
_ALWAYS = ("batch_size", "iters", "learning_rate", "num_layers", "max_seq_length")
_PER_NODE = frozenset({"model", "data", "adapter_path", "resume_adapter_file", "train", "config"})
_FILE_ONLY = ("lora_parameters", "lr_schedule", "optimizer_config")
_FEATURES = "_feature"


@dataclass(frozen=True)
class JobSizes:
    """Sizes that the launch depends on; None where they are not known."""

    layers: int | None = None
    """The model's number of layers, which mlx-lm does not let num_layers exceed."""
    examples: int | None = None
    """For training."""
    gradient_bytes: int | None = None
    """The size of one all_sum."""
    converted: str | None = None
    """PlanInputs.converted."""


def manual_launch(config: Config, network: NetworkPlan, hostfile: Path, sizes: JobSizes) -> Launching:
    """The launch of `config` over `network`, whose hostfile is at `hostfile`, with notes on how it differs from a run.

    Raises LaunchError when there is no mlx.launch."""
    notes: list[str] = []
    ranks = len(config.nodes)
    if not config.job.words:
        settings = _settings(config, ranks, sizes, notes)
        nodes = [_with_converted(node, sizes.converted) for node in config.nodes]
        lines = [_training(config, node, settings, hostfile) for node in nodes]
        if sizes.converted is not None:
            notes.append("--data is what `flightdeck preflight` makes of the job's data on each node")
        notes.append("mlx-lm averages the ranks' losses with equal weight, and gives all ranks equal shares")
    else:
        lines = [_command(config, rank, node) for rank, node in enumerate(config.nodes)]
    environment = {name: text for name, text in config.job.env.items() if is_public(name)}
    environment = common_environment(network, environment, gradient_bytes=sizes.gradient_bytes)
    lines = [exports(gpu_environment(network, rank, environment)) + line for rank, line in enumerate(lines)]
    if withheld := sorted(name for name in config.job.env if not is_public(name)):
        file = f"~/.flightdeck/by-hand/{config.job.name}.env"
        lines = [f"set -a && . {quoted(file)} && set +a && {line}" for line in lines]
        note = f"{', '.join(withheld)} of [job] env: write NAME=value lines into {file} on every node (chmod 600)"
        notes.append(f"{note}; --env is visible in ps there")
    distinct = {line: [rank for rank, other in enumerate(lines) if other == line] for line in lines}
    cases = " ".join(f"{'|'.join(map(str, which))}) {line} ;;" for line, which in distinct.items())
    # For a single rank mlx.launch names an empty hostfile, which MLX cannot parse.
    script = f'{"unset MLX_HOSTFILE; " if ranks == 1 else ""}case "$MLX_RANK" in {cases} esac'
    argv = arguments(
        hostfile=hostfile,
        starting_port=config.cluster.starting_port or STARTING_PORT,
        program=["/bin/sh", "-c", script],
        environment=environment,
        backend=network.backend,
    )
    if any(not node.local for node in config.nodes):
        notes.append("your own ssh must reach every node without a prompt")
    written = PlannedHostfile(path=str(hostfile), document=hostfile_document(network))
    command = shlex.join(argv)
    shown = config.job.redactor()(command)
    if shown != command:
        notes.append("the command's credentials are left out: it does not run as it is shown")
    return Launching(mlx_launch_command=shown, launch_notes=tuple(notes), hostfile=written)


def _settings(config: Config, ranks: int, sizes: JobSizes, notes: list[str]) -> dict[str, Any]:
    """The job's keys as stock mlx-lm accepts them."""
    settings = {key: value for key, value in config.job.mlx_lm.items() if key not in _PER_NODE}
    settings["fine_tune_type"] = config.job.fine_tune_type
    job_services = services(settings.get("report_to"))
    if (tokens := settings.pop("batch_tokens", None)) is not None:
        settings["batch_size"] = full_sequences(config.job.mlx_lm, ranks)
        notes.append(f"mlx-lm has no batch_tokens = {tokens}: batch_size is {settings['batch_size']} here")
        apply_rate_rule(settings)
    batch = int(settings["batch_size"])
    if batch % ranks:
        settings["batch_size"] = -(-batch // ranks) * ranks
        notes.append(f"batch_size is {settings['batch_size']} here: mlx-lm's must divide by the {ranks} ranks")
    if sizes.layers is not None and int(settings["num_layers"]) > sizes.layers:
        settings["num_layers"] = sizes.layers
        notes.append(f"num_layers is {sizes.layers} here, as many as the model has: mlx-lm refuses more")
    precision, moments = (settings.pop(key, AUTO) for key in ("optimizer_precision", "moments"))
    if (precision, moments) not in (("parameter", AUTO), ("parameter", "float32")):
        notes.append(
            "mlx-lm keeps the optimizer's state in the parameters' type: optimizer_precision and moments are left out"
        )
    recomputed = settings["grad_checkpoint"]
    settings["grad_checkpoint"] = recomputed not in (False, AUTO)
    if settings["grad_checkpoint"] and recomputed is not True:
        notes.append("mlx-lm recomputes all layers or none: grad_checkpoint is true here")
    if settings.get("sequence_tiling") == AUTO:
        del settings["sequence_tiling"]
    for key in ("max_grad_norm", "save_best", "patience", "sequence_tiling"):
        if settings.pop(key, None):
            notes.append(f"mlx-lm has no {key}: it is left out")
    epochs = settings.pop("epochs", None)
    if epochs is not None and sizes.examples is not None:
        settings["iters"] = epoch_iterations(epochs, sizes.examples // int(settings["batch_size"]))
        what = f"{epochs:g} x {sizes.examples} examples in batches of {settings['batch_size']}"
        notes.append(f"mlx-lm has no epochs: iters is {settings['iters']} here, {what}")
    elif epochs is not None:
        notes.append("mlx-lm has no epochs: add --iters, epochs x examples / batch_size, or it trains 1000 iterations")
    if "tensorboard" in job_services:
        settings["report_to"] = ",".join(name for name in job_services if name != "tensorboard") or None
        notes.append("mlx-lm does not write for TensorBoard: it is left out of report_to")
    # It always does.
    settings.pop("compile_on_cpu", None)
    if settings.pop("wire", "auto") != "auto":
        notes.append("mlx-lm sends gradients in their own type: wire is left out")
    return settings


def _with_converted(node: NodeConfig, name: str | None) -> NodeConfig:
    folder = f"{node_root() if node.local else f'~/{ROOT}'}/data/{name}"
    return node if name is None else node.model_copy(update={"data": folder})


def _training(config: Config, node: NodeConfig, settings: Mapping[str, Any], hostfile: Path) -> str:
    job = config.job
    folder = str(hostfile.parent) if node.local else "~/.flightdeck/by-hand"
    words = [quoted(node.python), "-m", "mlx_lm", "lora", "--train"]
    paths = {
        "--model": node.model or job.model,
        "--data": node.data or job.data,
        "--adapter-path": job.mlx_lm.get("adapter_path") or f"{folder}/{job.name}.adapters",
        "--resume-adapter-file": job.mlx_lm.get("resume_adapter_file"),
    }
    for option, path in paths.items():
        if path is not None:
            words += [option, quoted(on_node(path, node, config.folder))]
    in_file = {}
    for key, value in settings.items():
        if key in _FILE_ONLY or key.endswith(_FEATURES):
            if value is not None and value != DEFAULTS.get(key):
                in_file[key] = value
        elif key in _ALWAYS or value != DEFAULTS.get(key):
            words += _option(key, value)
    into = f"cd {quoted(node.workdir)} && "
    if not in_file:
        return f"{into}exec {' '.join(words)}"
    # These keys have no option. The file is YAML, which includes JSON.
    return f"{into}printf %s {shlex.quote(json.dumps(in_file))} | {' '.join(words)} --config /dev/stdin"


def _option(key: str, value: Any) -> list[str]:
    option = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return [option] if value else []
    return [] if value is None else [option, shlex.quote(f"{value:g}" if isinstance(value, float) else str(value))]


def _command(config: Config, rank: int, node: NodeConfig) -> str:
    """The job's own command with its placeholders expanded as by a rank's keeper."""
    program, *rest = config.job.words
    placeholders = {
        "{workdir}": quoted(node.workdir),
        "{model}": quoted(on_node(node.model, node, config.folder)) if node.model else "",
        "{data}": quoted(on_node(node.data, node, config.folder)) if node.data else "",
        "{python}": quoted(node.python),
        "{rank}": str(rank),
    }
    words = [placeholders["{python}"] if program in ("python", "python3") else _expand(program, placeholders)]
    words += [_expand(word, placeholders) for word in rest]
    return f"cd {quoted(node.workdir)} && exec {' '.join(words)}"


def _expand(word: str, placeholders: Mapping[str, str]) -> str:
    """One word of the command, quoted for the shell, with its placeholders replaced."""
    parts = re.split(f"({'|'.join(map(re.escape, placeholders))})", word)
    return "".join(placeholders[part] if part in placeholders else shlex.quote(part) for part in parts if part) or "''"
