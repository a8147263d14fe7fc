"""The same parsers on the project's recorded outputs of real Macs."""

from __future__ import annotations

from engine.models import NodeFacts
from engine.nodes import macos, power, rdma
from engine.nodes.answer import read_facts
from engine.nodes.interfaces import hardware_ports, mac_interfaces, thunderbolt_devices
from engine.nodes.thunderbolt import thunderbolt_ports
from engine.nodes.topology import topology
from tests.unit.nodes.macs import NOW
from tests.unit.nodes.samples import fixture, with_fixtures

pytestmark = with_fixtures


def test_a_macbook_cabled_to_a_studio_is_one_cable_seen_from_both_ends() -> None:
    ports = {
        "studio": thunderbolt_ports(
            fixture("system_profiler-SPThunderboltDataType-json__omlx-m3ultra"),
            {str(number): f"en{number + 1}" for number in range(1, 7)},
        ),
        "macbook": thunderbolt_ports(
            fixture("system_profiler-SPThunderboltDataType-json__omlx-m5max"), {"1": "en1", "2": "en6", "3": "en2"}
        ),
    }
    found = topology([NodeFacts(node=name, host=name, probed_at=NOW, thunderbolt=each) for name, each in ports.items()])
    (cable,) = found.cables
    assert (cable.a, cable.a_device, cable.b, cable.b_device) == ("studio", "en3", "macbook", "en1")
    assert (cable.speed, found.shape, found.strangers) == ("80 Gb/s", "mesh", ())
    assert len(ports["studio"]) == 6
    disk = next(port for port in ports["studio"] if port.receptacle == "4")
    assert (disk.speed, disk.peer_uuid) == ("80 Gb/s", None)
    alone = topology([NodeFacts(node="macbook", host="m", probed_at=NOW, thunderbolt=ports["macbook"])])
    assert (alone.shape, alone.strangers) == ("single", ("macbook en1: Mac Studio",))


def test_hardware_ports_of_macos_27() -> None:
    ports = hardware_ports(fixture("networksetup-listallhardwareports__osaurus"))
    assert {port.device: port.name for port in ports}["en6"] == "Thunderbolt 2"
    assert thunderbolt_devices(ports, ()) == {"1": "en1", "2": "en6", "3": "en2"}


def test_a_port_of_its_own_and_a_member_of_the_bridge() -> None:
    def port(name: str, device: str) -> tuple[tuple[str, ...], bool | None, str | None]:
        interfaces = {interface.name: interface for interface in mac_interfaces(fixture(name))}
        found = interfaces[device]
        return found.ipv4, found.active, found.bridge

    assert port("ifconfig-a__linkfixtures-tb-port-own", "en7") == (("192.0.2.10/24",), True, None)
    assert port("ifconfig-a__linkfixtures-tb-port-bridge", "en6") == ((), True, "bridge0")
    assert port("ifconfig__blog-m4mini", "en3") == ((), False, "bridge0")
    assert port("ifconfig__blog-m4mini", "en0") == (("10.254.100.2/16",), True, None)
    assert port("ifconfig__autorustdesk", "en1") == ((), False, "bridge0")


def test_rdma_devices_their_ports_and_gids() -> None:
    six = rdma.names(fixture("ibv_devices__mlxdocs"))
    assert six == tuple(f"rdma_en{number}" for number in range(2, 8))
    assert rdma.names(fixture("ibv_devices__osaurus-rdma-disabled")) == ()
    states = rdma.mac_devices("", fixture("ibv_devinfo__linkfixtures-6dev"))
    assert [device.name for device in states if device.port_state == "PORT_ACTIVE"] == ["rdma_en7"]
    assert [device.ipv4_gid for device in states] == [None] * 6
    (with_ipv4,) = rdma.mac_devices("", fixture("ibv_devinfo-v-d__linkfixtures-ipv4"))
    (without,) = rdma.mac_devices("", fixture("ibv_devinfo-v-d__linkfixtures-no-ipv4"))
    assert (with_ipv4.ipv4_gid, without.ipv4_gid) == (True, False)
    assert rdma.mac_devices("", fixture("ibv_devinfo__exofork")) == ()
    assert rdma.enabled(fixture("rdma_ctl-status__monitor")) is True
    assert rdma.enabled(fixture("rdma_ctl-status__linkfixtures")) is False


def test_profiles() -> None:
    assert macos.profile(fixture("system_profiler-SPDisplaysDataType-json__joulewise")).gpu_cores == 40
    assert macos.profile(fixture("system_profiler-SPDisplaysDataType-json__scan")).gpu_cores == 19
    m2 = macos.profile(fixture("system_profiler-SPHardwareDataType-json__inventory"))
    assert (m2.chip, m2.model, m2.cores) == ("Apple M2 Ultra", "Mac14,14", 24)
    assert macos.profile(fixture("system_profiler-SPHardwareDataType-json__scan")).cores == 12


def test_sysctl_versions_and_heat() -> None:
    mini = fixture("sysctl-hw.model-hw.memsize-iogpu")
    assert (macos.memory_total(mini), macos.gpu_limit(mini)) == (32 * 2**30, None)
    assert macos.os_version(fixture("sw_vers__id")) == ("26.4.1", "25E253")
    assert macos.os_version(fixture("sw_vers__seen")) == ("26.5", "25F71")
    swap = fixture("sysctl-vm.swapusage")
    facts = read_facts({"system": "Darwin", "answers": {"sysctl": swap, "vm_stat": fixture("vm_stat__real")}})
    assert facts["swap_used_bytes"] == int(512.25 * 2**20)
    assert 10 * 2**30 < facts["memory_used_bytes"] < 16 * 2**30
    assert power.mac_thermal(fixture("pmset-g-therm__nominal")) == "nominal"
    assert power.mac_thermal(fixture("pmset-g-therm__machealth-nominal")) == "nominal"
    assert power.mac_thermal(fixture("pmset-g-therm__machealth-throttled")) == "CPU limited to 62 %"
