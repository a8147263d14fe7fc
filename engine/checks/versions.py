"""versions_match: python and the packages of the job's framework can be imported on every node, are recent enough, and
are the same everywhere.

Ranks with different mlx versions may disagree on what an all_sum is; mlx.launch does not check this. Nor does PyTorch.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from engine.checks import connectivity, mlx_cuda, sync
from engine.checks.check import Check, Findings
from engine.checks.context import CheckContext, once
from engine.checks.fixes import FLIGHTDECK, MAKE_ENVIRONMENT, Fix, posix
from engine.checks.interpreter import HOME_ENVIRONMENT, IMPORT_LIMIT_S, Interpreter, environment_of, probe_imports
from engine.checks.mlx_cuda import MlxNode
from engine.checks.plan_inputs import chosen_job
from engine.cluster.transport.base import quoted
from engine.config.models import Config, JobConfig, NodeConfig
from engine.models import CheckResult, NodeFacts
from engine.protocol.partition import version_numbers

NAME = "versions_match"


class Minimum(NamedTuple):
    """The least version of a package."""

    version: tuple[int, ...]
    reason: str = ""
    """Why no older one."""


MLX_MINIMUM = (0, 32, 1)
MLX_LM_MINIMUM = (0, 32, 0)
_UNTRIED = "and older ones were never tried"
_COMMAND = {
    "lm_eval": Minimum((0, 4, 9), "the first whose module tells it"),
    "mlx": Minimum(MLX_MINIMUM),
    "mlx-lm": Minimum(MLX_LM_MINIMUM),
    "torch": Minimum((2, 0), _UNTRIED),
    "accelerate": Minimum((1, 6), "the first with FSDP2 (fsdp_version)"),
    "deepspeed": Minimum((0, 16), _UNTRIED),
}
_RECIPE = {
    "torch": Minimum((2, 6), "the first with torch.distributed.fsdp.fully_shard"),
    "transformers": Minimum((4, 56), "the first with the argument dtype"),
    "peft": Minimum((0, 14), _UNTRIED),
}
_MLX_NAMES = {"jaccl-ring": "jaccl"}
"""Backend of a network plan → MLX's name for it, where that differs."""
_MAKES = "makes an environment below ~/.flightdeck there, and writes it as its python into the configuration"
_LIMIT_S = 2 * IMPORT_LIMIT_S + 5
_LOCAL_LABEL = re.compile(r"\+(cpu|cu[0-9]{2,4}|rocm[0-9.]{1,8}|xpu|auto)$")
"""PyTorch's, of the builds that its own index has; "auto" is uv's choice among them, by the node's GPU."""


def requirements(job: JobConfig) -> dict[str, Minimum]:
    """The packages that the job's ranks need, in the order in which they are reported."""
    minimums = _COMMAND if job.kind.own_model is not None else _COMMAND | _RECIPE
    return {name: minimums[name] for name in job.kind.packages(job.words)}


async def run(context: CheckContext) -> CheckResult:
    interpreters, backend = await asyncio.gather(node_versions(context), planned_backend(context))
    # With the strategy that the plan chooses.
    config = context.config.model_copy(update={"job": await chosen_job(context)})
    return evaluate(config, interpreters, backend, await context.facts())


@once
async def node_versions(context: CheckContext) -> dict[str, Interpreter]:
    """Node name → its interpreter, with mlx-lm, or with PyTorch imported."""
    interpreters, job = await asyncio.gather(context.interpreters(), chosen_job(context))
    return await context.of_interpreters(lambda node: probe_imports(context.agent(node), interpreters[node.name], job))


async def planned_backend(context: CheckContext) -> str:
    """The network plan's backend; the framework's over TCP where there is none, which hostfile_valid reports."""
    network = await context.possible_network()
    return network.backend if network is not None else context.config.job.kind.framework.tcp_backend


def backend_name(backend: str) -> str:
    """The framework's name for the backend of a network plan."""
    return _MLX_NAMES.get(backend, backend)


def evaluate(
    config: Config,
    interpreters: dict[str, Interpreter],
    backend: str = "ring",
    facts: Mapping[str, NodeFacts] | None = None,
) -> CheckResult:
    """Rank 0's versions are what the others are compared with; another patch version of Python only warns."""
    first = interpreters[config.nodes[0].name]
    needed = requirements(config.job)
    findings = Findings(NAME, config)
    for node in config.nodes:
        interpreter = interpreters[node.name]
        findings.evidence[node.name] = interpreter.describe()
        need = _wanted(first.packages.get("mlx"), MLX_MINIMUM)
        of_mlx = MlxNode(node.python, interpreter, (facts or {}).get(node.name), need)
        cuda = mlx_cuda.advice(of_mlx, first, backend) if "mlx" in needed else None
        if cuda is not None:
            findings.fault(node, *cuda)
        elif (problem := _problem(interpreter, first, backend, needed)) is not None:
            fault, wanted = problem
            advice, fix = _fix(config, node, of_mlx, first, wanted)
            findings.fault(node, f"{fault}{advice}", fix)
        elif backend == "nccl" and (mismatch := _cuda_problem(interpreter, first)) is not None:
            findings.fault(node, mismatch)
        elif first.python not in (None, interpreter.python):
            findings.warn(node, f"python {interpreter.python}, rank 0 has {first.python}")
    return findings.verdict(f"the same on all nodes: {first.describe()}")


def _problem(
    seen: Interpreter, first: Interpreter, backend: str, needed: Mapping[str, Minimum]
) -> tuple[str, dict[str, str]] | None:
    """A message, and the packages that would fix it as name → requirement; None when there is no problem."""
    wanted = {name: _wanted(first.packages.get(name), least.version) for name, least in needed.items()}
    if seen.python is None:
        return seen.problem or "the interpreter did not answer", wanted
    if first.python is not None and _minor(first.python) != _minor(seen.python):
        return f"python {seen.python}, rank 0 has {first.python}", wanted
    if seen.problem:
        return seen.problem, {name: wanted[name] for name in wanted if name not in (*seen.packages, *seen.unknown)}
    return _version_problem(seen, first, backend_name(backend), needed, wanted)


def _version_problem(
    seen: Interpreter, first: Interpreter, backend: str, needed: Mapping[str, Minimum], wanted: Mapping[str, str]
) -> tuple[str, dict[str, str]] | None:
    main = next(iter(needed))
    for name, least in needed.items():
        if not new_enough(mine := seen.packages.get(name), least.version):
            why = f", {least.reason}" if least.reason else ""
            return f"{name} {mine} is older than {dotted(least.version)}{why}", {name: wanted[name]}
    if backend not in seen.backends:
        need = wanted[main]
        if (main, backend) == ("torch", "nccl") and not _LOCAL_LABEL.search(need := need.removesuffix("+cpu")):
            # Rank 0 has the build that lacks it, too, or one without a label.
            need += "+auto"
        return f"this build of {main} has no {backend} backend", {main: need}
    for name in needed:
        mine, theirs = seen.packages.get(name), first.packages.get(name)
        if theirs is not None and not _same(mine, theirs):
            return f"{name} {mine}, rank 0 has {theirs}", {name: wanted[name]}
    return None


def _wanted(first: str | None, minimum: tuple[int, ...]) -> str:
    return f"=={first}" if new_enough(first, minimum) else f">={dotted(minimum)}"


def _same(one: str | None, other: str) -> bool:
    """PyTorch's CPU and CUDA builds of one version have different labels, and connect by gloo."""
    return one is not None and _LOCAL_LABEL.sub("", one) == _LOCAL_LABEL.sub("", other)


def _cuda_problem(seen: Interpreter, first: Interpreter) -> str | None:
    """Why NCCL cannot run with this build of torch, or not with rank 0's."""
    build, reference = seen.build, first.build
    if build is None or reference is None:
        return None
    shown = re.search(r"CUDA Version: ([0-9]{1,3})\.([0-9]{1,3})", build.nvidia_smi or "")
    if build.cuda is None:
        return "this build of torch has no CUDA: install one that has"
    if shown is not None and int(shown[1]) < int(build.cuda.split(".")[0]):
        driver = f"{shown[1]}.{shown[2]}"
        return f"torch is built for CUDA {build.cuda}, its NVIDIA driver is for CUDA {driver}: update the driver"
    if build.gpus == 0:
        return f"torch can use none of its GPUs: {build.cuda_problem or 'none is visible'}"
    if build.cuda != reference.cuda:
        return f"torch is built for CUDA {build.cuda}, rank 0's for {reference.cuda}"
    return None if build.nccl == reference.nccl else f"torch has NCCL {build.nccl}, rank 0's {reference.nccl}"


def _fix(
    config: Config, node: NodeConfig, of_mlx: MlxNode, first: Interpreter, wanted: dict[str, str]
) -> tuple[str, Fix | None]:
    """Advice for the message, and a command to be pasted on the node.

    Packages are installed into the environment that is there, but not into the one that Flight Deck runs from. Another
    interpreter, and what that one lacks, is put into a new environment, never into one that exists: `mkdir` refuses."""
    seen, facts = of_mlx.seen, of_mlx.facts
    if not wanted or (seen.python is None and not seen.absent):
        return "", None
    minor = _minor(first.python or "")
    if node.local and Path(environment_of(node.python)).expanduser() == Path(sys.prefix):
        wanted = {name: f"=={version}" for name, version in seen.packages.items()} | wanted
    elif seen.python is not None and (first.python is None or _minor(seen.python) == minor):
        return "", install_fix(node.python, seen, wanted, facts)
    of_ours = config.environment.requirements is not None or ("mlx" in wanted and "cuda" not in of_mlx.extra)
    if config.file is not None and of_ours:
        command = f"{MAKE_ENVIRONMENT} --node {shlex.quote(node.name)} --yes -c {shlex.quote(str(config.file))}"
        return "", Fix(command, f"{_MAKES}; `{FLIGHTDECK}environments remove` takes it back")
    path, environment = PurePosixPath(node.python), environment_of(node.python)
    beside = seen.beside if seen.python is None else environment if seen.venv else HOME_ENVIRONMENT
    if beside is not None:
        environment = beside.with_name(f"{beside.name}-{minor or 'new'}")
    python, advice = node.python, ""
    if path not in (environment / "bin" / name for name in ("python", "python3", f"python{minor}")):
        python = f"{environment}/bin/python"
        advice = f': the fix makes {environment} and changes nothing else; then set python = "{python}" in its [[node]]'
    make = f"mkdir -p {quoted(environment.parent)} && mkdir {quoted(environment)}"
    version = f"--python {minor} " if minor else ""
    install = install_command(python, wanted, of_mlx.extra)
    fill = f"uv venv {version}{quoted(environment)} && {install} || {{ rm -r {quoted(environment)}; false; }}"
    return advice, Fix(f"{make} && {posix(fill)}", f"makes {environment}, and changes nothing else; rm -r removes it")


def install_fix(python: str, seen: Interpreter, wanted: dict[str, str], facts: NodeFacts | None = None) -> Fix:
    """`install_command`, and as its effect the commands back to what was there."""
    extra = MlxNode(python, seen, facts).extra
    before = {name: f"=={seen.packages[name]}" for name in wanted if name in seen.packages}
    added = " ".join(name for name in wanted if name not in before)
    back = [install_command(python, before, extra)] if before else []
    back += [f"uv pip uninstall --python {quoted(python)} {added}"] if added else []
    effect = f"changes packages in the environment of {python}; `{' && '.join(back)}` takes back all but dependencies"
    return Fix(install_command(python, wanted, extra), effect)


def _minor(version: str) -> str:
    """For example "3.11"; "" where that is not how it begins. Nothing else of a node's text enters a command."""
    return match[0] if (match := re.match(r"[0-9]{1,3}\.[0-9]{1,3}(?![0-9])", version)) else ""


def install_command(python: str, wanted: dict[str, str], extra: str) -> str:
    """The command that puts `wanted` (package → version condition) into the environment of `python`, mlx with this
    `extra`; a labelled torch comes from PyTorch's own index."""
    label = _LOCAL_LABEL.search(wanted.get("torch", ""))
    index = f" --torch-backend {label[1]}" if label else ""
    # Another build of the version that is there counts as installed.
    index += " --reinstall-package torch" if "torch" in wanted else ""
    named = (
        shlex.quote(f"{name}{extra if name == 'mlx' else ''}{_LOCAL_LABEL.sub('', need)}")
        for name, need in wanted.items()
    )
    return f"uv pip install{index} --python {quoted(python)} {' '.join(named)}"


def new_enough(version: str | None, minimum: tuple[int, ...]) -> bool:
    return version_numbers(version)[: len(minimum)] >= minimum


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


CHECK = Check(
    NAME, "python and the framework's packages (MLX or PyTorch): importable, new enough, the same", run,
    label="versions", time_limit_s=_LIMIT_S, needs=(connectivity.NAME,), after=(sync.NAME,),
)  # fmt: skip
