"""What preflight looks at of the workers' files, as the configuration decides it: for the checks, and for the plan that
tells of them beforehand."""

from __future__ import annotations

from engine.config.models import FlightConfig

_CONFIGURATIONS = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")
"""Words of a command that end so are programs and settings; others may be outputs, which are a node's own."""
_OF_MLX_LM = ("worker bundle, which is the training script", "job", "model configuration", "model index", "tokenizer")


def sync_not_applicable(config: FlightConfig) -> str | None:
    return "every node is this machine: there is nothing to sync" if all(node.local for node in config.nodes) else None


def sync_switched_off(config: FlightConfig) -> str | None:
    return None if config.preflight.sync else "switched off: [preflight] sync = false"


def manifests(config: FlightConfig) -> tuple[str, ...]:
    """What is compared of the workdirs, in words. A bare home is no project, and is not read; a home that is written
    as an absolute path is known on its node alone."""
    homes = [node.name for node in config.nodes if node.workdir.rstrip("/") in ("~", "")]
    where = {(node.ssh, node.workdir) for node in config.nodes if node.name not in homes}
    told = [f"not compared on {', '.join(homes)}: the workdir is a bare home"] if homes else []
    if len(where) > 1:
        told.insert(
            0, "tree manifest of workdir (path, SHA-256) the same on all nodes" + " that have one" * bool(homes)
        )
    elif where:
        told.insert(0, "one workdir: nothing to compare")
    return tuple(told)


def comparison_not_applicable(config: FlightConfig) -> str | None:
    return "one worker: there is nobody to agree with" if len(config.nodes) == 1 else None


def comparison_switched_off(config: FlightConfig) -> str | None:
    return None if config.preflight.consistency else "switched off: [preflight] consistency = false"


def own_files(config: FlightConfig) -> list[str]:
    """The words of a job's own command that name its script and settings, as written."""
    command = config.job.command or ()
    return [
        word
        for number, word in enumerate(command)
        if word.endswith(_CONFIGURATIONS)
        and not word.startswith("-")
        and "{rank}" not in word
        and (number or not word.startswith("/"))
        and "\0" not in word
    ]


def compared(config: FlightConfig) -> tuple[str, ...]:
    """What worker_consistency compares, in words. A command of the user's own brings its own job, model and data."""
    return _OF_MLX_LM if config.job.command is None else (*own_files(config), "worker bundle")
