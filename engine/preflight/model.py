"""model_present: configuration, tokenizer and all safetensors shards lie where each node looks, and are alike."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult, CheckStatus
from engine.preflight import connectivity
from engine.preflight.check import Check, ranks_of, trains, verdict
from engine.preflight.scene import Scene
from engine.security.sanitise import plain
from engine.transport.base import quoted

NAME = "model_present"
_LIMIT_S = 60.0


@dataclass(frozen=True)
class ModelFiles:
    """What lies in one model directory, as `worker.looks.model` says."""

    kind: str = "?"
    """model_type of config.json."""
    bytes: int = 0
    shards: int = 0
    faults: list[str] = field(default_factory=list)
    repository: str | None = None
    """Where config.json says that it came from, as ORG/NAME."""
    hashes: dict[str, str] = field(default_factory=dict)
    """File → SHA-256, of weights their size."""

    @classmethod
    def of(cls, said: dict[str, Any]) -> ModelFiles:
        return cls(
            kind=plain(said["kind"]),
            bytes=int(said["bytes"]),
            shards=int(said["shards"]),
            faults=[plain(fault) for fault in said["faults"]],
            repository=said["repository"],
            hashes={plain(name): plain(digest) for name, digest in said["hashes"].items()},
        )

    def words(self) -> str:
        if self.faults:
            return "; ".join(self.faults)
        return f"{self.kind}, {self.shards} shard{'s' * (self.shards != 1)}, {self.bytes / 1e6:,.1f} MB"


async def look(scene: Scene) -> CheckResult:
    config = scene.config
    wanted = {node.name: node.model or config.job.model or "" for node in config.nodes}

    async def read(node: NodeConfig) -> ModelFiles:
        return ModelFiles.of(await scene.look(node, "model", wanted[node.name], timeout_s=_LIMIT_S))

    answers = await scene.on_all(read)
    found = {name: _found(answer) for name, answer in answers.items()}
    faults: dict[str, str] = {}
    fixes: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(config):
        files = found[node.name]
        if files.faults:
            faults[node.name] = f"{wanted[node.name]}: {files.words()}"
            blames = blames or (rank, node.name)
            if files.repository:
                fixes[node.name] = f"hf download {files.repository} --local-dir {quoted(wanted[node.name])}"
    evidence = {name: f"{path}: {found[name].words()}" for name, path in wanted.items()}
    if faults:
        summary = "; ".join(dict.fromkeys(faults.values()))
        if not fixes:
            summary += "; set `model` in [job] to a directory with an mlx-lm model"
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    first = config.nodes[0]
    for rank, node in ranks_of(config):
        if differing := _differing(found[first.name].hashes, found[node.name].hashes):
            summary = f"{node.name} holds another model than {first.name}: {', '.join(differing)}"
            fix = f"copy {first.name}'s {wanted[first.name]} to {wanted[node.name]} of {node.name}"
            return verdict(
                NAME,
                CheckStatus.FAIL,
                f"{summary}; {fix}",
                evidence=evidence,
                fixes=_copies(scene, node, wanted),
                blames=(rank, node.name),
            )
    return verdict(NAME, CheckStatus.PASS, found[first.name].words(), evidence=evidence)


def _found(answer: ModelFiles | FlightDeckError) -> ModelFiles:
    return ModelFiles(faults=[str(answer)]) if isinstance(answer, FlightDeckError) else answer


def _differing(here: dict[str, str], there: dict[str, str]) -> list[str]:
    return sorted(name for name in {*here, *there} if here.get(name) != there.get(name))[:4]


def _copies(scene: Scene, node: NodeConfig, wanted: dict[str, str]) -> dict[str, str]:
    """The command that copies rank 0's model, where both are this machine's and it can be said in one."""
    first = scene.config.nodes[0]
    if not (node.local and first.local):
        return {}
    source, target = (shlex.quote(wanted[each.name]) for each in (first, node))
    return {node.name: f"cp {source}/* {target}/"}


CHECK = Check(
    NAME,
    "config.json, tokenizer and all safetensors shards, the same on all nodes",
    look,
    time_limit_s=_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    not_applicable=trains,
)
