"""What macOS's commands print, read; the samples are our own, of the form of recorded ones."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster import facts as answer
from engine.cluster import hardware, network_interfaces, sensors
from engine.cluster.network_interfaces import hardware_ports, linux_interfaces, mac_interfaces, thunderbolt_devices
from engine.cluster.topology import thunderbolt_ports
from engine.models import Interface, NodeFacts
from tests.data import NODES, node_output
from tests.unit.cluster.macs import NOW, mesh


def test_interfaces_of_a_mac_with_one_port_bridged_and_one_of_its_own() -> None:
    ports = hardware_ports(node_output("networksetup-english.txt"))
    found = {interface.name: interface for interface in mac_interfaces(node_output("ifconfig-studio.txt"), ports)}
    assert found["en0"] == Interface(name="en0", ipv4=("10.0.0.11/24",), active=True, port_name="Ethernet")
    assert (found["en1"].active, found["en1"].port_name) == (False, "Wi-Fi")
    assert (found["en3"].bridge, found["en3"].ipv4) == ("bridge0", ())
    assert (found["en4"].bridge, found["en4"].ipv4) == (None, ("192.168.0.1/30",))
    assert found["bridge0"].ipv4 == ("169.254.7.7/16",)
    assert found["utun3"].ipv4 == ("100.64.0.9/32",)
    assert "gif0" not in found


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_receptacles_are_matched_to_devices_in_any_language(language: str) -> None:
    ports = hardware_ports(node_output(f"networksetup-{language}.txt"))
    interfaces = mac_interfaces(node_output("ifconfig-studio.txt"), ports)
    assert thunderbolt_devices(ports, interfaces) == {"1": "en3", "2": "en4"}
    assert thunderbolt_devices(ports, (), rdma=["rdma_en4"]) == {"1": "en3", "2": "en4"}


def test_where_nothing_tells_which_ports_are_thunderbolt_none_is() -> None:
    ports = hardware_ports(node_output("networksetup-chinese.txt"))
    assert thunderbolt_devices(ports, mac_interfaces("", ports)) == {}


def test_a_peer_behind_a_hub_is_found_and_a_display_is_none() -> None:
    far, near = thunderbolt_ports(node_output("thunderbolt-hub.json"), {"1": "en5", "2": "en4"})
    assert (far.device, far.receptacle, far.peer_name, far.speed) == ("en4", "2", "MacBook Pro", "40 Gb/s")
    assert far.peer_uuid == "00000009-0000-4000-8000-000000000003"
    assert (near.device, near.peer_uuid, near.peer_name) == ("en5", None, None)


def test_cores_of_both_level_names() -> None:
    for text, cores in (("sysctl-m3.txt", (32, 24)), ("sysctl-m5.txt", (18, 18))):
        facts = answer.read_facts({"system": "Darwin", "answers": {"sysctl": node_output(text)}})
        assert (facts["cores"], facts["performance_cores"]) == cores
    assert hardware.mac_performance_cores({"hw.perflevel0.physicalcpu": "8"}) is None


@pytest.mark.parametrize(("text", "limit"), [("0", None), ("491520", 480 * 2**30), ("lots", None), ("", None)])
def test_a_wired_limit_of_0_is_the_systems_default(text: str, limit: int | None) -> None:
    assert hardware.mac_gpu_limit(hardware.parse_sysctl(f"iogpu.wired_limit_mb: {text}\n")) == limit


def test_rdma_devices() -> None:
    table = (
        "    device          \t   node GUID\n    ------          \t----------------\n    rdma_en6\t0000000000008401\n"
    )
    found = {device.name: (device.port_state, device.ipv4_gid) for device in network_interfaces.mac_rdma_devices(table, node_output("ibv_devinfo-studio.txt"))}  # noqa: E501  # fmt: skip
    assert found == {
        "rdma_en3": ("PORT_DOWN", None),
        "rdma_en4": ("PORT_ACTIVE", True),
        "rdma_en5": ("PORT_ACTIVE", False),
        "rdma_en6": (None, None),
    }


@pytest.mark.parametrize(
    ("gid", "ipv4"),
    [
        ("::ffff:192.168.0.1", True),
        ("0000:0000:0000:0000:0000:ffff:c0a8:0001", True),
        ("fe80:0000:0000:0000:0200:5eff:fe00:5307", False),
        ("fe80::ffff:5eff:fe00:5307", False),
        ("", False),
    ],
)
def test_gids_that_stand_for_ipv4(gid: str, ipv4: bool) -> None:
    assert network_interfaces.is_ipv4_gid(gid) is ipv4


@pytest.mark.parametrize(("text", "value"), [("enabled\n", True), ("disabled", False), ("", None), (None, None)])
def test_rdma_ctl(text: str | None, value: bool | None) -> None:
    assert network_interfaces.rdma_enabled(text) is value


def test_infiniband_of_linux() -> None:
    gids = ["fe80:0000:0000:0000:0002:c903:0000:0001", "0000:0000:0000:0000:0000:ffff:0a00:0001"]
    (device,) = network_interfaces.linux_rdma_devices([{"name": "mlx5_0", "state": "4: ACTIVE\n", "gids": gids}])
    assert (device.name, device.port_state, device.ipv4_gid) == ("mlx5_0", "PORT_ACTIVE", True)
    assert network_interfaces.linux_rdma_devices([{"name": "mlx5_1", "state": None, "gids": []}])[0].port_state is None


def test_power_of_a_mac() -> None:
    assert sensors.mac_power_source(node_output("pmset-batt.txt")) == "battery 63 %"
    assert sensors.mac_power_source("Now drawing from 'AC Power'\n") == "AC"
    assert sensors.mac_power_source("Now drawing from 'UPS Power'\n") == "UPS Power"
    assert sensors.mac_low_power_mode(" tcpkeepalive         1\n lowpowermode         1\n womp 1\n") is True
    assert sensors.mac_low_power_mode(" lowpowermode         0\n") is False
    assert sensors.mac_low_power_mode(" powermode            2\n") is False
    assert sensors.mac_low_power_mode("") is None


def test_power_and_heat_of_linux() -> None:
    battery = {"type": "Battery", "capacity": "40", "status": "Discharging"}
    assert sensors.linux_power_source([battery, {"type": "Mains", "online": "0"}]) == "battery 40 %"
    assert sensors.linux_power_source([battery, {"type": "Mains", "online": "1"}]) == "AC"
    assert sensors.linux_power_source([battery | {"scope": "Device"}]) is None
    assert sensors.linux_low_power_mode("low-power\n") is True
    zone = {
        "name": "thermal_zone0",
        "type": "x86_pkg_temp",
        "trip_point_0_type": "passive",
        "trip_point_0_temp": "95000",
    }
    assert sensors.linux_thermal([zone | {"temp": "61000"}]) == "nominal"
    assert sensors.linux_thermal([zone | {"temp": "96000"}]) == "x86_pkg_temp at 96 °C, passive limit 95 °C"
    assert sensors.linux_thermal([]) is None


def test_interfaces_of_linux() -> None:
    found = {interface.name: interface for interface in linux_interfaces(json.loads(node_output("ip-addr.json")))}
    assert found["br0"] == Interface(name="br0", ipv4=("10.0.0.5/24",), active=True)
    assert found["eth0"].bridge == "br0"
    assert (found["lo"].active, found["wlp3s0"].active) == (None, False)


NVIDIA = """NVIDIA H100 80GB HBM3, 81559, GPU-8f1d0a52-1111-2222-3333-000000000001, 550.54.15
NVIDIA L4, [N/A], GPU-8f1d0a52-1111-2222-3333-000000000002, 550.54.15

NVIDIA A100-SXM4-80GB, 81920, GPU-8f1d0a52-1111-2222-3333-000000000003, 550.54.15
"""
NVIDIA_MORE = """GPU-8f1d0a52-1111-2222-3333-000000000001, 9.0, Disabled
GPU-8f1d0a52-1111-2222-3333-000000000002, 8.9, [N/A]
GPU-8f1d0a52-1111-2222-3333-000000000003, [Not Supported], Enabled
"""
NVIDIA_TABLE = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |\n"


def test_nvidia_gpus_in_the_form_that_nvidia_smi_documents() -> None:
    """Written from its documentation: no such machine has been recorded."""
    found = hardware.nvidia_gpus(NVIDIA, NVIDIA_MORE)
    assert [(gpu.name, gpu.memory_bytes, gpu.compute_capability, gpu.mig) for gpu in found] == [
        ("NVIDIA H100 80GB HBM3", 81559 * 2**20, "9.0", False),
        ("NVIDIA L4", None, "8.9", None),
        ("NVIDIA A100-SXM4-80GB", 81920 * 2**20, None, True),
    ]
    assert hardware.nvidia_versions(NVIDIA, NVIDIA_TABLE) == ("550.54.15", "12.4")


def test_an_older_nvidia_smi_lists_its_gpus_without_what_it_does_not_know() -> None:
    refused = 'Field "compute_cap" is not a valid field to query.\n'
    ended = {"command": "nvidia-smi", "exit_code": 2, "stderr": ""}
    answers = {"nvidia_smi": NVIDIA, "nvidia_smi_more": refused}
    found = answer.read_facts({"system": "Linux", "answers": answers, "unknown": {"nvidia_smi_more": ended}})
    assert (found["unknown"], found["nvidia_driver"], found["cuda"]) == ({}, "550.54.15", None)
    (gpu, *_) = found["gpus"]
    assert (gpu.name, gpu.compute_capability, gpu.mig) == ("NVIDIA H100 80GB HBM3", None, None)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "NVIDIA-SMI has failed, because, it, could not\n"])
def test_without_a_gpu_or_a_driver_there_are_none(text: str) -> None:
    assert hardware.nvidia_gpus(text, text) == ()
    assert hardware.nvidia_versions(text, text) == (None, None)


def test_what_a_mac_reports_of_its_chip_and_gpu() -> None:
    texts = {
        "sysctl": node_output("sysctl-m3.txt"),
        "profile": node_output("profile-m3.json"),
        "sysctl_gpu": "iogpu.wired_limit_mb: 0\n",
    }
    texts["mlx_import"] = json.dumps({"gpu": "gpu", "backends": ["ring"], "working_set": 498216206336})
    fields = answer.read_facts({"system": "Darwin", "answers": texts})
    assert (fields["chip"], fields["model"], fields["gpu_cores"]) == ("Apple M3 Ultra", "Mac15,14", 80)
    assert (fields["gpu_limit_bytes"], fields["swap_used_bytes"]) == (498216206336, 0)
    texts["sysctl_gpu"] = "iogpu.wired_limit_mb: 491520\n"
    assert answer.read_facts({"system": "Darwin", "answers": texts})["gpu_limit_bytes"] == 491520 * 2**20
    del texts["profile"]
    assert answer.read_facts({"system": "Darwin", "answers": texts})["gpu_cores"] is None


def test_chips_and_models() -> None:
    generations = hardware.THUNDERBOLT_GENERATIONS
    assert (generations["Apple M3 Ultra"], generations["Apple M3 Max"], set(generations.values())) == (5, 4, {3, 4, 5})
    assert (hardware.PORT_WITHOUT_RDMA.get("Mac15,14"), hardware.PORT_WITHOUT_RDMA.get("Mac17,7")) == ("en2", None)


def test_names_from_a_node_are_safe_to_show_and_short() -> None:
    hostile = "\x1b]0;owned\x07Mac\u202e" + "x" * 5000
    report = json.dumps({"SPThunderboltDataType": [{"domain_uuid_key": hostile, "_items": [{"_name": hostile, "domain_uuid_key": hostile}]}]})  # noqa: E501  # fmt: skip
    (port,) = thunderbolt_ports(report, {})
    (named,) = hardware_ports(f"Hardware Port: {hostile}\nDevice: en5\n").values()
    for text in (port.domain_uuid, port.peer_uuid, port.peer_name, named):
        assert text is not None and text.isprintable() and len(text) <= 120
    assert hardware_ports("Hardware Port: a\nDevice: en5; rm -rf /\n") == {}
    output = {"system": "Linux", "hostname": hostile, "answers": {"user": hostile, "versions": {"mlx": hostile}}}
    for value in answer.read_facts(output).values():
        assert not isinstance(value, str) or (value.isprintable() and len(value) <= 255)


SAMPLES = [path.read_text(encoding="utf-8") for path in sorted(NODES.iterdir())]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
NAMES = (
    *("sysctl", "sysctl_gpu", "vm_stat", "sw_vers", "profile", "thunderbolt", "networksetup", "ifconfig", "pmset"),
    *("ibv_devices", "ibv_devinfo", "rdma_ctl", "pmset_batt", "pmset_therm", "thermal_pressure", "mlx_import", "disk"),
    *("user", "home", "versions", "cpuinfo", "meminfo", "os_release", "product", "board", "platform_profile", "ip"),
    *("addresses", "zones", "infiniband", "power_supply", "nvidia_smi", "nvidia_smi_more", "nvidia_smi_table"),
)


@st.composite
def torn(draw: st.DrawFn) -> str:
    """A sample cut, with a piece of it gone or something else in its place."""
    text = draw(st.sampled_from(SAMPLES))
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 40)))
    cut = draw(st.integers(0, len(text)))
    return (text[:start] + draw(st.text(max_size=8)) + text[end:])[: cut or None]


@given(st.sampled_from(["Darwin", "Linux", "Other"]), st.dictionaries(st.sampled_from(NAMES), torn() | JSON), JSON)
def test_no_answer_whatever_upsets_the_reader(system: str, answers: dict[str, object], other: object) -> None:
    fields = answer.read_facts(
        {"system": system, "answers": answers, "unknown": other, "cores": other, "hostname": other}
    )
    facts = NodeFacts(node="a", host="h", probed_at=NOW, **fields)
    assert NodeFacts.model_validate_json(facts.model_dump_json()) == facts
    assert len(facts.model_dump_json()) < 200_000


def test_an_endless_nesting_is_no_peer() -> None:
    deep = '{"_items": [' * 5000
    assert thunderbolt_ports('{"SPThunderboltDataType": [' + deep, {}) == ()
    item: dict[str, object] = {"domain_uuid_key": "too deep"}
    for _ in range(100):
        item = {"_items": [item]}
    (port,) = thunderbolt_ports(json.dumps({"SPThunderboltDataType": [item | {"domain_uuid_key": "x"}]}), {})
    assert port.peer_uuid is None


def test_a_whole_macs_answer() -> None:
    facts = mesh(2).fact(0)
    assert (facts.os, facts.os_version, facts.os_build) == ("macOS 26.4.1 (25E253)", "26.4.1", "25E253")
    assert (facts.rdma_enabled, facts.rdma_devices[0].name, facts.thunderbolt[0].device) == (True, "rdma_en3", "en3")
