"""NodeFacts of each node: the `facts` probe's answers, parsed. A node that does not answer yields facts too, with the
reason in `problem` and what to do in `fix`; a command of the probe that ended without an answer is in `unknown`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from engine.cluster import hardware, network_interfaces, sensors
from engine.cluster.agent_client import AgentClient, InterpreterMissing
from engine.cluster.network_interfaces import hardware_ports, linux_interfaces, mac_interfaces, thunderbolt_devices
from engine.cluster.topology import thunderbolt_ports
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, HostKeyChanged, HostKeyUnknown, LoginRefused, NodeUnreachable
from engine.models import Failed, FrozenModel, HostKeyChange, HostKeyOffer, Late, NodeFacts, NoValue, Unparsable
from engine.node.probes.facts import MAC_COMMANDS, MLX_CUDA
from engine.protocol.job import Framework
from engine.security.sanitise import (
    count_or_none,
    finite_or_none,
    json_object,
    json_or_none,
    last_line,
    plain,
    text_or_none,
)

Fields = dict[str, Any]
_NAMES = 64
_THUNDERBOLT = "SPThunderboltDataType"
_TELLS = {"sysctl": "memory_total_bytes", "vm_stat": "memory_used_bytes", "sw_vers": "os_version"} | {
    "pmset_batt": "power_source"
}
"""Command → a fact that it tells on every Mac."""


class FactsReport(FrozenModel, extra="allow"):
    """Output of the `facts` probe: the system's own output, by name."""

    answers: dict[str, Any]
    unknown: dict[str, Any] = Field(default_factory=dict, max_length=_NAMES)


def read_facts(report: Mapping[str, Any]) -> Fields:
    """Fields of NodeFacts, each None or left out where the node did not tell."""
    answers = json_object(report.get("answers"))
    versions, disk = json_object(answers.get("versions")), answers.get("disk")
    disk_free, disk_total = disk if isinstance(disk, list) and len(disk) == 2 else (None, None)
    unknown = _unknown(report.get("unknown"))
    fields: Fields = {
        "system": text_or_none(report.get("system"), 20),
        "hostname": text_or_none(report.get("hostname")),
        "user": text_or_none(answers.get("user"), 64),
        "home": text_or_none(answers.get("home"), 255),
        "python": text_or_none(report.get("python"), 40),
        "cores": count_or_none(report.get("cores")),
        "disk_free_bytes": count_or_none(disk_free),
        "disk_total_bytes": count_or_none(disk_total),
        "mlx": text_or_none(versions.get("mlx"), 40),
        "mlx_lm": text_or_none(versions.get("mlx_lm"), 40),
        "torch": text_or_none(versions.get("torch"), 40),
    }
    fields["os"] = " ".join(filter(None, (fields["system"], text_or_none(report.get("release"), 60)))) or None
    fields |= _mlx(unknown.get("mlx_import"), answers)
    if fields["system"] == "Darwin":
        fields |= _mac(answers, fields)
    elif fields["system"] == "Linux":
        fields |= _linux(report, answers, fields)
    return fields | {"unknown": _really_unknown(unknown, answers, fields)}


def _unknown(value: object) -> dict[str, Late | Failed]:
    """The probe's commands that ended without an answer, by name."""
    unknown: dict[str, Late | Failed] = {}
    for name, given in json_object(value).items():
        entry, key = json_object(given), text_or_none(name, 40)
        if key is None:
            continue
        command, late_s, code = plain(entry.get("command", name), 120), entry.get("late_s"), entry.get("exit_code")
        if isinstance(late_s, int | float):
            unknown[key] = Late(command=command, after_s=late_s)
        elif type(code) is int:
            stderr = plain(last_line(str(entry.get("stderr") or "")), 200)
            unknown[key] = Failed(command=command, exit_code=code, stderr=stderr)
    return unknown


def _really_unknown(unknown: Mapping[str, NoValue], answers: Mapping[str, Any], fields: Fields) -> dict[str, NoValue]:
    """The commands whose facts are not known. One that failed may have printed them all the same: some exit with an
    error where there is nothing to report. Of a Mac, an answer that cannot be read counts as none."""
    missing = {name: why for name, why in unknown.items() if isinstance(why, Late) or not _text(answers, name).strip()}
    if fields["system"] != "Darwin":
        if fields.get("interfaces"):
            missing.pop("ip", None)
        for more in ("nvidia_smi_more", "nvidia_smi_table"):
            # Older drivers know no such columns; without a driver the first query reports it.
            missing.pop(more, None)
        return missing
    buses = json_object(json_or_none(answers.get("thunderbolt"))).get(_THUNDERBOLT)
    ports = {port.device for port in fields["thunderbolt"]}
    # ifconfig ends each of these with its status: one without has been cut off.
    whole = all(interface.active is not None for interface in fields["interfaces"] if interface.name in ports)

    def to_end(name: str) -> bool:
        text = _text(answers, name)
        return name not in unknown and text.endswith("\n") and "\ufffd" not in text

    readable = {
        "thunderbolt": (buses == [] or bool(fields["thunderbolt"])) and "\ufffd" not in _text(answers, "thunderbolt"),
        "ifconfig": whole and any(port.ipv4 for port in fields["interfaces"]) and to_end("ifconfig"),
        "ibv_devices": network_interfaces.whole_rdma_table(_text(answers, "ibv_devices"), _text(answers, "ibv_devinfo"))
        and to_end("ibv_devices"),
        "networksetup": any(port.port_name for port in fields["interfaces"]) and to_end("networksetup"),
        **{name: fields[field] is not None for name, field in _TELLS.items()},
    }
    for name in (name for name, read in readable.items() if name in answers and name not in missing and not read):
        output = plain(_text(answers, name).strip(), 200)
        missing[name] = unknown.get(name) or Unparsable(command=" ".join(MAC_COMMANDS[name]), output=output)
    return missing


def _text(answers: Mapping[str, Any], name: str) -> str:
    value = answers.get(name)
    return value if isinstance(value, str) else ""


def _mac_thermal(answers: Mapping[str, Any]) -> str | None:
    """pmset has no level to tell of on Apple silicon even when it is hot; the pressure level is what macOS acts on."""
    pressure = sensors.mac_thermal_pressure(_text(answers, "thermal_pressure"))
    if pressure not in (None, "nominal"):
        return pressure
    return sensors.mac_thermal_warning(_text(answers, "pmset_therm")) or pressure


def _mlx(why: NoValue | None, answers: Mapping[str, Any]) -> Fields:
    """The device and the backends; the limit is that of the GPU's recommended working set."""
    imported = json_object(json_or_none(_text(answers, "mlx_import").strip()))
    versions, backends = json_object(answers.get("versions")), imported.get("backends")
    build = next((f"{name} {version}" for name in MLX_CUDA if (version := text_or_none(versions.get(name), 40))), None)
    if not imported and isinstance(why, Failed):
        return {"mlx_problem": why.stderr or f"importing it ended with {why.exit_code}", "mlx_cuda": build}
    return {
        "gpu": text_or_none(imported.get("gpu"), 20),
        "backends": tuple(filter(None, map(text_or_none, backends[:_NAMES] if isinstance(backends, list) else ()))),
        "gpu_limit_bytes": count_or_none(imported.get("working_set")),
        "mlx_cuda": build,
    }


def _mac(answers: Mapping[str, Any], fields: Fields) -> Fields:
    sysctl = hardware.parse_sysctl(_text(answers, "sysctl"))
    name, version, build = hardware.mac_os(_text(answers, "sw_vers"))
    ports = hardware_ports(_text(answers, "networksetup"))
    interfaces = mac_interfaces(_text(answers, "ifconfig"), ports)
    devices = network_interfaces.mac_rdma_devices(_text(answers, "ibv_devices"), _text(answers, "ibv_devinfo"))
    thunderbolt = thunderbolt_devices(ports, interfaces, [device.name for device in devices])
    gpu_limit = hardware.mac_gpu_limit(hardware.parse_sysctl(_text(answers, "sysctl_gpu")))
    return {
        "os": text_or_none(name),
        "os_version": version,
        "os_build": build,
        "model": text_or_none(sysctl.get("hw.model"), 40),
        "chip": text_or_none(sysctl.get("machdep.cpu.brand_string"), 60),
        "cores": count_or_none(sysctl.get("hw.ncpu")) or fields["cores"],
        "performance_cores": hardware.mac_performance_cores(sysctl),
        "gpu_cores": hardware.mac_gpu_cores(_text(answers, "profile")),
        "memory_total_bytes": count_or_none(sysctl.get("hw.memsize")),
        "memory_used_bytes": hardware.mac_memory_used(_text(answers, "vm_stat")),
        "gpu_limit_bytes": gpu_limit or fields.get("gpu_limit_bytes"),
        "swap_used_bytes": sensors.mac_swap_used(sysctl.get("vm.swapusage", "")),
        "power_source": sensors.mac_power_source(_text(answers, "pmset_batt")),
        "low_power_mode": sensors.mac_low_power_mode(_text(answers, "pmset")),
        "thermal": _mac_thermal(answers),
        "interfaces": interfaces,
        "thunderbolt": thunderbolt_ports(_text(answers, "thunderbolt"), thunderbolt),
        "rdma_enabled": network_interfaces.rdma_enabled(_text(answers, "rdma_ctl")),
        "rdma_devices": devices,
    }


def _linux(report: Mapping[str, Any], answers: Mapping[str, Any], fields: Fields) -> Fields:
    total, used, swap_used = hardware.linux_memory(_text(answers, "meminfo"))
    name, version = hardware.linux_os(_text(answers, "os_release"))
    listed = _text(answers, "nvidia_smi")
    gpus = hardware.nvidia_gpus(listed, _text(answers, "nvidia_smi_more"))
    driver, cuda = hardware.nvidia_versions(listed, _text(answers, "nvidia_smi_table"))
    on_cpu, imported = fields.get("gpu") == "cpu", json_object(json_or_none(_text(answers, "mlx_import").strip()))
    gpus = hardware.mlx_gpus(imported.get("gpus"), gpus) or gpus
    # The smallest one's, as a rank uses one; MLX's own is of the first.
    limits = [fields.get("gpu_limit_bytes"), *(gpu.memory_bytes for gpu in gpus if not on_cpu)]
    return {
        "os": text_or_none(name) or fields["os"],
        "os_version": text_or_none(version, 40),
        "model": text_or_none(answers.get("product"), 60) or text_or_none(answers.get("board"), 60),
        "chip": text_or_none(hardware.linux_chip(_text(answers, "cpuinfo")), 60)
        or text_or_none(report.get("machine"), 60),
        "memory_total_bytes": total,
        "memory_used_bytes": used,
        "gpu_limit_bytes": min(filter(None, limits), default=None),
        "gpus": gpus,
        "nvidia_driver": driver,
        "cuda": cuda,
        "swap_used_bytes": swap_used,
        "power_source": sensors.linux_power_source(answers.get("power_supply")),
        "low_power_mode": sensors.linux_low_power_mode(_text(answers, "platform_profile")),
        "thermal": sensors.linux_thermal(answers.get("zones")),
        "interfaces": linux_interfaces(json_or_none(answers.get("ip"))) or linux_interfaces(answers.get("addresses")),
        "rdma_devices": network_interfaces.linux_rdma_devices(answers.get("infiniband")),
    }


TIME_LIMIT_S = 12.0
"""For the probe, whose commands have shorter limits. On a node that is awake it takes 0.1 s."""
_CONNECT_S = 3.0
"""Added for the connection; one that fails reports the reason within this time."""

Clock = Callable[[], datetime]


def now() -> datetime:
    return datetime.now(UTC)


async def probe_all(config: Config, fleet: Fleet, clock: Clock = now) -> list[NodeFacts]:
    """The facts of every node, probed at once, in the configuration's order."""
    by_name = {facts.node: facts async for facts in probe_as_completed(config, fleet, clock)}
    return [by_name[node.name] for node in config.nodes]


async def probe_as_completed(config: Config, fleet: Fleet, clock: Clock = now) -> AsyncGenerator[NodeFacts, None]:
    """The facts of each node as it answers, or has failed to. Closing the iterator ends the probes.

    Nodes of one host, python and workdir (ranks on one machine) are probed once."""
    alike: dict[tuple[str, str, str], list[NodeConfig]] = {}
    for node in config.nodes:
        alike.setdefault((node.ssh, node.python, node.workdir), []).append(node)
    probed_for = {nodes[0].name: nodes for nodes in alike.values()}
    framework = config.job.framework
    probes = [
        asyncio.create_task(probe(nodes[0], fleet.agent(nodes[0]), clock, framework=framework))
        for nodes in alike.values()
    ]
    try:
        for done in asyncio.as_completed(probes):
            facts = await done
            for node in probed_for[facts.node]:
                yield facts.model_copy(update={"node": node.name})
    finally:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def probe(node: NodeConfig, agent: AgentClient, clock: Clock = now, *, framework: Framework = "mlx") -> NodeFacts:
    """The facts of `node` now. Never raises for a node that cannot answer: `problem` then says why."""
    try:
        async with asyncio.timeout(TIME_LIMIT_S + _CONNECT_S):
            fields = await _ask(node, agent, clock, framework)
        return NodeFacts(node=node.name, host=node.ssh, probed_at=clock(), **fields)
    except TimeoutError:
        fields = {"problem": f"no answer within {TIME_LIMIT_S + _CONNECT_S:g} s", "problem_kind": "unreachable"}
    except InterpreterMissing as error:
        fields = {"problem": f"no such interpreter: {node.python}", "problem_kind": "no python", "fix": error.todo}
    except FlightDeckError as error:
        fields = _refused(error, node)
    except Exception as error:
        # One node's fault, whatever it is, must not take the answers of the others with it.
        fields = {"problem": text_or_none(f"the probe failed: {type(error).__name__}: {error}", 200)}
    return NodeFacts(node=node.name, host=node.ssh, probed_at=clock(), **fields)


async def _ask(node: NodeConfig, agent: AgentClient, clock: Clock, framework: Framework) -> Fields:
    round_trip_s = await agent.round_trip_s()
    asked = [node.workdir, *([framework] if framework != "mlx" else [])]
    outcome = await agent.probe("facts", *asked, result_type=FactsReport, timeout_s=TIME_LIMIT_S)
    received = clock().timestamp()
    if isinstance(outcome, NoValue):
        return {"problem": str(outcome)}
    report = outcome.model_dump()
    fields = read_facts(report) | {"round_trip_s": round_trip_s}
    if (ended := finite_or_none(report.get("clock"))) is not None:
        # From the way back alone: on the way there a process is started, which takes longer than any network.
        fields["clock_skew_s"] = ended + (round_trip_s or 0.0) / 2 - received
    return fields


_KINDS: tuple[tuple[type[FlightDeckError], str], ...] = (
    (HostKeyUnknown, "key unknown"),
    (HostKeyChanged, "key changed"),
    (LoginRefused, "login refused"),
    (NodeUnreachable, "unreachable"),
)
"""Kinds of problem; the first three are NodeUnreachable too."""


def _refused(error: FlightDeckError, node: NodeConfig) -> Fields:
    fields: Fields = {
        "problem": text_or_none(f"{error.what}: {error.why}" if error.why else error.what, 300),
        "problem_kind": next((kind for type_, kind in _KINDS if isinstance(error, type_)), None),
        "fix": text_or_none(error.todo, 300),
    }
    if isinstance(error, HostKeyUnknown):
        fields["host_key"] = HostKeyOffer(target=error.target, key=error.key, fingerprint=error.fingerprint)
    elif isinstance(error, HostKeyChanged):
        fields["changed_key"] = HostKeyChange(target=node.ssh, accepted=error.expected, found=error.shown)
    return fields
