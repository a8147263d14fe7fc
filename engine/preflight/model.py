"""model_present: configuration, tokenizer and all safetensors shards lie where each node looks, and are alike."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult
from engine.preflight import connectivity, sync
from engine.preflight.answers import Model
from engine.preflight.check import Check, Findings, trains
from engine.preflight.fixes import copies, moved_aside
from engine.preflight.scene import Scene
from engine.transport.base import quoted

NAME = "model_present"
_LIMIT_S = 60.0
_ANOTHER = "set `model` in [job] to a directory with an mlx-lm model"


async def look(scene: Scene) -> CheckResult:
    nodes = scene.config.nodes
    wanted = {node.name: scene.path(node, node.model or scene.config.job.model or "") for node in nodes}

    async def read(node: NodeConfig) -> Model:
        return await scene.look(node, "model", wanted[node.name], said=Model, timeout_s=_LIMIT_S)

    answers = await scene.on_all(read)
    found = Findings(NAME, scene.config)
    whole: dict[str, Model] = {}
    for node in nodes:
        said = answers[node.name]
        words = str(said) if isinstance(said, FlightDeckError) else said.words()
        found.evidence[node.name] = f"{wanted[node.name]}: {words}"
        if isinstance(said, FlightDeckError):
            found.fault(node, words)
        elif said.faults:
            fix = f"hf download {said.repository} --local-dir {quoted(wanted[node.name])}" if said.repository else None
            found.fault(node, f"{wanted[node.name]}: {words}", fix)
        else:
            whole[node.name] = said
    if not whole:
        return found.verdict("", advice="" if found.fixes else _ANOTHER)
    first = next(node for node in nodes if node.name in whole)
    for node in nodes:
        if node.name in whole and (differing := _differing(whole[first.name].hashes, whole[node.name].hashes)):
            found.fault(node, f"{node.name} holds another model than {first.name}: {', '.join(differing)}")
    lacking = [node for node in nodes if node.name in found.faults and isinstance(answers[node.name], Model)]
    lines = [copies(first, lacking, wanted)]
    for node in lacking:
        too_many = sorted(set(whole[node.name].hashes) - set(whole[first.name].hashes)) if node.name in whole else []
        lines += [moved_aside(node, posixpath.join(wanted[node.name], name)) for name in too_many]
    fix = " && ".join(dict.fromkeys(filter(None, lines)))
    return found.verdict(whole[first.name].words(), fix_command=fix or None)


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*here, *there} if here.get(name) != there.get(name))[:4]


CHECK = Check(
    NAME,
    "config.json, tokenizer and all safetensors shards, the same on all nodes",
    look,
    time_limit_s=_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    after=(sync.NAME,),
    not_applicable=trains,
)
