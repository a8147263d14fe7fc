"""The answer of `facts_script`, read into the fields of NodeFacts. Any bytes are an answer; none of them raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.nodes import chips, gauges, linux, macos, power, rdma
from engine.nodes.interfaces import hardware_ports, linux_interfaces, mac_interfaces, thunderbolt_devices
from engine.nodes.thunderbolt import thunderbolt_ports
from engine.nodes.words import document, seconds, whole, word

Fields = dict[str, Any]
ANSWER_LIMIT = 4 * 2**20
_MARK = b'{"flightdeck": "facts"'
_NAMES = 64


def said(stdout: bytes) -> Fields | None:
    """The script's own line among whatever a login shell prints besides; None when it is not there."""
    at = stdout.rfind(_MARK)
    line = stdout[at : at + ANSWER_LIMIT].partition(b"\n")[0] if at >= 0 else b""
    found = document(line)
    return found if isinstance(found, dict) else None


def node_clock(answer: Mapping[str, Any]) -> float | None:
    """The node's wall clock at the moment of the answer."""
    return seconds(answer.get("clock"))


def read_facts(answer: Mapping[str, Any]) -> Fields:
    """Fields of NodeFacts, each None or left out where the node did not tell."""
    answers = answer.get("answers")
    answers = answers if isinstance(answers, dict) else {}
    fields: Fields = {
        "system": word(answer.get("system"), 20),
        "hostname": word(answer.get("hostname")),
        "user": word(answers.get("user"), 64),
        "home": word(answers.get("home"), 255),
        "python": word(answer.get("python"), 40),
        "cores": whole(answer.get("cores")),
        "late": _words(answer.get("late"), 40),
    }
    fields |= _disk(answers.get("disk")) | _versions(answers) | _mlx(answer, answers)
    if fields["system"] == "Darwin":
        fields |= _mac(answers, fields)
    elif fields["system"] == "Linux":
        fields |= _linux(answer, answers)
    else:
        fields["os"] = " ".join(filter(None, (fields["system"], word(answer.get("release"), 60)))) or None
    return fields


def _text(answers: Mapping[str, Any], name: str) -> str:
    value = answers.get(name)
    return value if isinstance(value, str) else ""


def _words(value: object, limit: int) -> tuple[str, ...]:
    texts = value[:_NAMES] if isinstance(value, list) else []
    return tuple(text for item in texts if (text := word(item, limit)) is not None)


def _mac_thermal(answers: Mapping[str, Any]) -> str | None:
    """pmset has no level to tell of on Apple silicon even when it is hot; the pressure level is what macOS acts on."""
    pressure = gauges.mac_thermal(_text(answers, "thermal_pressure"))
    if pressure not in (None, "nominal"):
        return pressure
    return power.mac_thermal(_text(answers, "pmset_therm")) or pressure


def _disk(value: object) -> Fields:
    if not isinstance(value, list) or len(value) != 2:
        return {}
    return {"disk_free_bytes": whole(value[0]), "disk_total_bytes": whole(value[1])}


def _versions(answers: Mapping[str, Any]) -> Fields:
    versions = answers.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    return {"mlx": word(versions.get("mlx"), 40), "mlx_lm": word(versions.get("mlx_lm"), 40)}


def _mlx(answer: Mapping[str, Any], answers: Mapping[str, Any]) -> Fields:
    """The device and the backends; the limit is of the GPU's recommended working set."""
    imported = document(_text(answers, "mlx_import").strip())
    if not isinstance(imported, dict):
        return {"mlx_problem": word(answer.get("mlx_problem"), 200)}
    return {
        "gpu": word(imported.get("gpu"), 20),
        "backends": _words(imported.get("backends"), 20),
        "gpu_limit_bytes": whole(imported.get("working_set")),
        "mlx_problem": None,
    }


def _mac(answers: Mapping[str, Any], known: Fields) -> Fields:
    sysctl, profile = _text(answers, "sysctl"), macos.profile(_text(answers, "profile"))
    version, build = macos.os_version(_text(answers, "sw_vers"))
    ports = hardware_ports(_text(answers, "networksetup"))
    interfaces = mac_interfaces(_text(answers, "ifconfig"), ports)
    devices = rdma.mac_devices(_text(answers, "ibv_devices"), _text(answers, "ibv_devinfo"))
    thunderbolt = thunderbolt_devices(ports, interfaces, [device.name for device in devices])
    chip = word(macos.chip(sysctl), 60) or profile.chip
    table = chips.chip(chip)
    return {
        "os": word(macos.os_name(_text(answers, "sw_vers"))),
        "os_version": version,
        "os_build": build,
        "model": word(macos.sysctl(sysctl).get("hw.model"), 40) or profile.model,
        "chip": chip,
        "cores": macos.cores(sysctl) or profile.cores or known["cores"],
        "performance_cores": macos.performance_cores(sysctl),
        "gpu_cores": profile.gpu_cores or (table.gpu_cores if table else None),
        "memory_total_bytes": macos.memory_total(sysctl),
        "memory_used_bytes": macos.memory_used(_text(answers, "vm_stat")),
        "gpu_limit_bytes": macos.gpu_limit(_text(answers, "sysctl_gpu")) or known.get("gpu_limit_bytes"),
        "swap_used_bytes": gauges.mac_swap_used(macos.sysctl(sysctl).get("vm.swapusage", "")),
        "power_source": power.mac_source(_text(answers, "pmset_batt")),
        "low_power_mode": power.mac_low_power(_text(answers, "pmset")),
        "thermal": _mac_thermal(answers),
        "interfaces": interfaces,
        "thunderbolt": thunderbolt_ports(_text(answers, "thunderbolt"), thunderbolt),
        "rdma_enabled": rdma.enabled(_text(answers, "rdma_ctl")),
        "rdma_devices": devices,
    }


def _linux(answer: Mapping[str, Any], answers: Mapping[str, Any]) -> Fields:
    meminfo, release = _text(answers, "meminfo"), _text(answers, "os_release")
    total, used = linux.memory(meminfo)
    kernel = " ".join(filter(None, ("Linux", word(answer.get("release"), 60))))
    fields: Fields = {
        "os": word(linux.os_name(release)) or kernel,
        "os_version": word(linux.os_version(release), 40),
        "model": word(_text(answers, "product"), 60) or word(_text(answers, "board"), 60),
        "chip": word(linux.chip(_text(answers, "cpuinfo")), 60) or word(answer.get("machine"), 60),
        "memory_total_bytes": total,
        "memory_used_bytes": used,
        "swap_used_bytes": gauges.linux_swap_used(meminfo),
        "power_source": power.linux_source(answers.get("power_supply")),
        "low_power_mode": power.linux_low_power(answers.get("platform_profile")),
        "thermal": power.linux_thermal(answers.get("zones")),
        "interfaces": linux_interfaces(_text(answers, "ip")) or linux_interfaces(answers.get("addresses")),
        "rdma_devices": rdma.linux_devices(answers.get("infiniband")),
    }
    memory = linux.gpu_memory(_text(answers, "nvidia_smi"))
    return fields | ({"gpu_limit_bytes": memory} if memory is not None else {})
