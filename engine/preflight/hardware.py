"""hardware_layer: each node's GPU, its memory against what the job needs, macOS and RDMA where they are wanted, power,
heat, and the ring's ports, all from one probe of the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.models import CheckResult, CheckStatus, NodeFacts
from engine.planning.notes import Named
from engine.planning.rdma import node_obstacles
from engine.planning.wiring import Wiring
from engine.preflight import connectivity, ports, sync
from engine.preflight.answers import Holder
from engine.preflight.check import Check, Findings
from engine.preflight.need import Need, needs, plan_of
from engine.preflight.notes import NodeNotes
from engine.preflight.scene import Scene
from engine.transport.base import quoted

NAME = "hardware_layer"
_LIMIT_S = 60.0
_WIRING = "distributed_config"
"""The plan's refusal that hostfile_valid tells."""
_MEMORY = "memory"
"""The plan's refusal that is told node by node."""
_JACCL = ("jaccl", "jaccl-ring")


async def look(scene: Scene) -> CheckResult:
    facts, wiring, needed = await asyncio.gather(scene.facts(), _wiring(scene), needs(scene))
    refusals = [refusal for refusal in (await plan_of(scene)).refusals if refusal.name != _WIRING]
    return judge(scene.config, facts, needed, await _held(scene, wiring), refusals)


Held = Mapping[str, Mapping[str, Holder] | FlightDeckError]
"""Node → who holds those of its ports that are held, or why that is not known."""


def judge(
    config: FlightConfig,
    facts: Mapping[str, NodeFacts],
    needed: Mapping[str, Need],
    held: Held,
    refusals: Sequence[Named] = (),
) -> CheckResult:
    """The verdict; `refusals` are the plan's."""
    found = Findings(NAME, config)
    for node in config.nodes:
        notes = NodeNotes()
        seen = facts[node.name]
        if seen.problem is not None:
            notes.warn(f"its hardware is not known: {seen.problem}")
        else:
            _gpu(node, seen, notes)
            _memory(needed[node.name], notes)
            _rdma(config, seen, notes)
            _power(seen, notes)
        _ports(node, held.get(node.name, {}), notes)
        notes.tell(found, node)
    count = len(config.nodes)
    result = found.verdict(f"{count} node{'s' * (count != 1)} fit for the job")
    small = any(need.fits is False for need in needed.values())
    refused = [refusal.text for refusal in refusals if not (small and refusal.name == _MEMORY)]
    if not refused:
        return result
    # What the plan refuses, nothing launches: a person must change the job, or skip this check by its name.
    told = [*refused, *([result.summary] if result.status is not CheckStatus.PASS else [])]
    return result.model_copy(update={"status": CheckStatus.FAIL, "summary": "; ".join(told)})


async def _wiring(scene: Scene) -> Wiring | None:
    """None where there is none: hostfile_valid says why."""
    try:
        return await scene.wiring()
    except LaunchError:
        return None


async def _held(scene: Scene, wiring: Wiring | None) -> Held:
    first = scene.config.cluster.starting_port
    # Without a fixed one each attempt takes ports that are free then.
    return {} if first is None or wiring is None else await ports.held_ports(scene, wiring, first)


def _gpu(node: NodeConfig, facts: NodeFacts, notes: NodeNotes) -> None:
    name = " ".join(filter(None, (facts.chip, f"{facts.gpu_cores} GPU cores" if facts.gpu_cores else None)))
    if facts.mlx_problem is not None:
        notes.seen.append(f"{name or 'its chip'}, GPU not known: mlx cannot be imported")
    elif facts.gpu is None:
        notes.warn(f"whether MLX uses the GPU{f' of the {name}' if name else ''} is not known")
    elif facts.system == "Darwin" and facts.gpu != "gpu":
        version = f"=={facts.mlx}" if facts.mlx else ""
        install = f"uv pip install --python {quoted(node.python)} --reinstall {quoted(f'mlx{version}')}"
        notes.fault(f"MLX there uses the {facts.gpu} and not the GPU (Metal)", install)
    else:
        notes.seen.append(f"{name}: MLX uses its {facts.gpu}" if name else f"MLX uses its {facts.gpu}")


def _memory(need: Need, notes: NodeNotes) -> None:
    if need.fits is False:
        notes.fault(f"{need.told()}: lower batch_size or max_seq_length, or set grad_checkpoint = true in [job]")
    elif need.fits is None and need.wanted:
        notes.warn(need.told())
    else:
        notes.seen.append(need.told())


def _rdma(config: FlightConfig, facts: NodeFacts, notes: NodeNotes) -> None:
    """Where jaccl is demanded what is in its way is a fault; where it was only tried, the fallback to TCP is told."""
    if facts.os:
        notes.seen.append(facts.os)
    wanted, backend = config.cluster.backend, config.cluster.backend in _JACCL
    several = len({node.ssh for node in config.nodes}) > 1
    if not backend and not (wanted == "auto" and several and facts.system == "Darwin"):
        return
    obstacles = node_obstacles(facts)
    if not obstacles and not facts.rdma_devices:
        obstacles = ["ibv_devices shows no RDMA device"]
    for obstacle in obstacles:
        # What rdma_ctl does, a person does in Recovery OS: there is no command that could be pasted.
        if backend:
            notes.fault(f"no RDMA, which {wanted} needs: {obstacle}")
        else:
            notes.warn(f"no RDMA: {obstacle}")
    if not obstacles:
        notes.seen.append(f"RDMA {', '.join(device.name for device in facts.rdma_devices)}")


def _power(facts: NodeFacts, notes: NodeNotes) -> None:
    if facts.power_source is not None and facts.power_source.startswith("battery"):
        notes.warn(f"runs on {facts.power_source}: plug it in")
    elif facts.power_source is not None:
        notes.seen.append(f"power {facts.power_source}")
    if facts.thermal not in (None, "nominal"):
        notes.warn(f"is held back by heat: {facts.thermal}")
    elif facts.thermal is not None:
        notes.seen.append("heat nominal")


def _ports(node: NodeConfig, held: Mapping[str, Holder] | FlightDeckError, notes: NodeNotes) -> None:
    if isinstance(held, FlightDeckError):
        notes.warn(f"its ports are not known: {held}")
    elif held:
        notes.fault(ports.held_words(node, held), ports.held_fix(held))


CHECK = Check(
    NAME,
    "GPU, memory against the need, macOS, RDMA, power, heat, the ring's ports",
    look,
    time_limit_s=_LIMIT_S,
    needs=(connectivity.NAME,),
    after=(sync.NAME,),
)
