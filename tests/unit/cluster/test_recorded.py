"""The parsers on whole outputs of Macs, as long and as odd as the programs print them."""

from __future__ import annotations

from engine.cluster import hardware, network_interfaces, sensors
from engine.cluster.facts import read_facts
from engine.cluster.network_interfaces import hardware_ports, mac_interfaces, thunderbolt_devices
from engine.cluster.topology import thunderbolt_ports, topology
from engine.models import NodeFacts
from tests.data import node_output
from tests.unit.cluster.macs import NOW

SWAP = "vm.swapusage: total = 4096.00M  used = 768.50M  free = 3327.50M  (encrypted)\n"


def test_a_macbook_cabled_to_a_studio_is_one_cable_seen_from_both_ends() -> None:
    ports = {
        "studio": thunderbolt_ports(
            node_output("thunderbolt-studio.json"), {str(number): f"en{number + 1}" for number in range(1, 7)}
        ),
        "macbook": thunderbolt_ports(node_output("thunderbolt-macbook.json"), {"1": "en2", "2": "en7", "3": "en3"}),
    }
    found = topology([NodeFacts(node=name, host=name, probed_at=NOW, thunderbolt=each) for name, each in ports.items()])
    (cable,) = found.cables
    assert (cable.a, cable.a_device, cable.b, cable.b_device) == ("studio", "en6", "macbook", "en7")
    assert (cable.speed, found.shape, found.strangers) == ("80 Gb/s", "mesh", ())
    assert len(ports["studio"]) == 6
    disk = next(port for port in ports["studio"] if port.receptacle == "1")
    assert (disk.speed, disk.peer_uuid) == ("40 Gb/s", None)
    alone = topology([NodeFacts(node="macbook", host="m", probed_at=NOW, thunderbolt=ports["macbook"])])
    assert (alone.shape, alone.strangers) == ("single", ("macbook en7: Mac Studio",))


def test_hardware_ports_of_macos_27() -> None:
    ports = hardware_ports(node_output("networksetup-macbook.txt"))
    assert ports["en7"] == "Thunderbolt 2"
    assert thunderbolt_devices(ports, ()) == {"1": "en2", "2": "en7", "3": "en3"}


def test_a_port_of_its_own_and_a_member_of_the_bridge() -> None:
    def port(name: str, device: str) -> tuple[tuple[str, ...], bool | None, str | None]:
        interfaces = {interface.name: interface for interface in mac_interfaces(node_output(name), {})}
        found = interfaces[device]
        return found.ipv4, found.active, found.bridge

    assert port("ifconfig-own-port.txt", "en5") == (("10.20.1.41/24",), True, None)
    assert port("ifconfig-bridge-member.txt", "en4") == ((), True, "bridge0")
    assert port("ifconfig-mini.txt", "en3") == ((), False, "bridge0")
    assert port("ifconfig-mini.txt", "en0") == (("10.30.7.9/16",), True, None)
    assert port("ifconfig-office.txt", "en1") == ((), False, "bridge0")


def test_rdma_devices_their_ports_and_gids() -> None:
    six = network_interfaces.rdma_device_names(node_output("ibv_devices-studio.txt"))
    assert six == tuple(f"rdma_en{number}" for number in range(2, 8))
    header = "".join(node_output("ibv_devices-studio.txt").splitlines(keepends=True)[:2])
    assert network_interfaces.rdma_device_names(header) == ()
    states = network_interfaces.mac_rdma_devices("", node_output("ibv_devinfo-six.txt"))
    assert [device.name for device in states if device.port_state == "PORT_ACTIVE"] == ["rdma_en5"]
    assert [device.ipv4_gid for device in states] == [None] * 6
    (with_ipv4,) = network_interfaces.mac_rdma_devices("", node_output("ibv_devinfo-ipv4-gid.txt"))
    (without,) = network_interfaces.mac_rdma_devices("", node_output("ibv_devinfo-no-ipv4-gid.txt"))
    assert (with_ipv4.ipv4_gid, without.ipv4_gid) == (True, False)
    assert network_interfaces.mac_rdma_devices("", "No IB devices found\n") == ()
    assert network_interfaces.rdma_enabled("enabled\n") is True
    assert network_interfaces.rdma_enabled("disabled\n") is False


def test_gpu_cores() -> None:
    assert hardware.mac_gpu_cores(node_output("displays-headless.json")) == 40
    assert hardware.mac_gpu_cores(node_output("displays-builtin.json")) == 16
    assert hardware.mac_gpu_cores(node_output("hardware-studio.json")) is None


def test_sysctl_versions_and_heat() -> None:
    mini = "hw.model: Mac16,10\nhw.memsize: 25769803776\niogpu.wired_limit_mb: 0\n"
    mini_facts = read_facts({"system": "Darwin", "answers": {"sysctl": mini, "sysctl_gpu": mini}})
    assert (mini_facts["memory_total_bytes"], mini_facts["gpu_limit_bytes"]) == (24 * 2**30, None)
    for version, build in (("26.3.2", "25D101"), ("26.5", "25F70")):
        text = f"ProductName:\t\tmacOS\nProductVersion:\t\t{version}\nBuildVersion:\t\t{build}\n"
        assert hardware.mac_os(text)[1:] == (version, build)
    answers = {"sysctl": SWAP, "vm_stat": node_output("vm_stat-24gb.txt")}
    facts = read_facts({"system": "Darwin", "answers": answers})
    assert facts["swap_used_bytes"] == sensors.mac_swap_used(SWAP) == int(768.5 * 2**20)
    assert facts["memory_used_bytes"] == (500_000 - 4_071 + 211_090 + 300_200) * 16384
    assert sensors.mac_thermal_warning(node_output("pmset-therm-notes.txt")) == "nominal"
    assert sensors.mac_thermal_warning(node_output("pmset-therm-intel.txt")) == "nominal"
    assert sensors.mac_thermal_warning(node_output("pmset-therm-throttled.txt")) == "CPU limited to 71 %"
