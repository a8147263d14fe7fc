"""Which backend and which addresses a cluster gets, and what is said when it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.config.models import ClusterConfig, FlightConfig, JobConfig, NodeConfig
from engine.errors import LaunchError
from engine.models import Interface, NodeFacts, RdmaDevice, Topology
from engine.nodes.topology import topology
from engine.planning.links import setup_commands
from engine.planning.wire import wire
from engine.planning.wiring import Wiring
from tests.unit.nodes.macs import NOW, Macs, mesh, ring
from tests.unit.planning.test_against_mlx import addressed


def config(*nodes: NodeConfig, backend: str = "auto") -> FlightConfig:
    cluster = ClusterConfig.model_validate({"backend": backend})
    return FlightConfig(cluster=cluster, nodes=nodes, job=JobConfig(name="job", command=("true",)))


def node(name: str, ssh: str | None = None, ips: Sequence[str] = (), **fields: Any) -> NodeConfig:
    return NodeConfig(name=name, ssh=ssh or f"{name}.local", ips=tuple(ips), python="/p", workdir="/", **fields)


def linux(name: str, *addresses: str, ssh: str | None = None, **fields: Any) -> NodeFacts:
    """A node with these addresses, "eth0 10.0.0.1/24"."""
    named = [address.split() for address in addresses]
    interfaces = tuple(Interface(name=device, ipv4=(ip,), active=True) for device, ip in named)
    plain: dict[str, Any] = {"system": "Linux", "interfaces": interfaces, "backends": ("ring",), "gpu": "cpu"}
    return NodeFacts(node=name, host=ssh or f"{name}.local", probed_at=NOW, **(plain | fields))


def wired(flight: FlightConfig, *facts: NodeFacts) -> Wiring:
    return wire(flight, facts, topology(facts))


def macs_wired(macs: Macs, facts: Sequence[NodeFacts] | None = None, backend: str = "auto") -> Wiring:
    facts = facts or macs.facts()
    return wired(config(*(node(name) for name in macs.names), backend=backend), *facts)


def changed(facts: Sequence[NodeFacts], which: int, **changes: Any) -> list[NodeFacts]:
    return [fact.model_copy(update=changes) if number == which else fact for number, fact in enumerate(facts)]


def refused(macs: Macs, facts: Sequence[NodeFacts], backend: str = "jaccl") -> str:
    with pytest.raises(LaunchError) as refusal:
        macs_wired(macs, facts, backend)
    return str(refusal.value)


OBSTACLES: list[tuple[dict[str, Any], str]] = [
    ({"rdma_enabled": False}, "mac1: RDMA is disabled: start it into Recovery OS, and in Terminal"),
    ({"rdma_enabled": None, "late": ("rdma_ctl",)}, "mac1: whether RDMA is enabled is not known: rdma_ctl did not"),
    ({"os_version": "26.1"}, "mac1: macOS 26.1, and RDMA needs 26.2"),
    ({"os_version": "15.7.3", "os_build": "24G1"}, "mac1: macOS 15.7.3, and RDMA needs 26.2"),
    ({"os_build": "25E999"}, "macOS builds differ: 26.4.1 (25E253) on mac0; 26.4.1 (25E999) on mac1"),
    ({"chip": "Apple M4"}, "mac1: Apple M4 has Thunderbolt 4, and RDMA needs 5"),
    ({"backends": ("ring",), "mlx": "0.30.0"}, "mac1: its MLX 0.30.0 has no jaccl"),
    ({"problem": "no answer on port 22"}, "mac1: not known: no answer on port 22"),
    ({"rdma_devices": (RdmaDevice(name="rdma_en3", port_state="PORT_DOWN"),)}, "mac1: rdma_en3 is PORT_DOWN"),
    ({"rdma_devices": (RdmaDevice(name="rdma_en9"),)}, "mac1: there is no rdma_en3"),
    ({"rdma_devices": (RdmaDevice(name="rdma_en3", ipv4_gid=False),)}, "mac1: rdma_en3 has no IPv4 address in its"),
    (
        {"interfaces": (Interface(name="en0", ipv4=("10.0.0.2/24",)), Interface(name="en3", bridge="bridge0"))},
        "mac1: en3 has no IPv4 address of its own (a member of bridge0)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), OBSTACLES, ids=[said for _, said in OBSTACLES])
def test_what_is_in_the_way_of_rdma_is_a_warning_and_only_a_demand_fails(changes: dict[str, Any], said: str) -> None:
    macs = addressed(mesh(2))
    facts = changed(macs.facts(), 1, **changes)
    assert said in refused(macs, facts)
    assert said in refused(macs, facts, "jaccl-ring")
    if "problem" not in changes:
        wiring = macs_wired(macs, facts)
        assert wiring.backend == "ring"
        assert any(said in text for text in wiring.warnings)
        assert all(host.rdma is None and host.ips for host in wiring.hosts)


def test_every_node_in_the_way_is_named() -> None:
    macs = addressed(mesh(3))
    text = refused(macs, macs.facts(rdma_enabled=False))
    assert all(f"mac{number}: RDMA is disabled" in text for number in range(3))


def test_missing_pairs_are_named() -> None:
    macs = addressed(ring(4))
    text = refused(macs, macs.facts())
    assert "no full mesh: no Thunderbolt cable between mac0 and mac2, mac1 and mac3" in text
    line = Macs([1, 2, 1], [((0, 0), (1, 0)), ((1, 1), (2, 0))])
    text = refused(addressed(line), addressed(line).facts(), "jaccl-ring")
    assert "no ring in the order of the nodes: no Thunderbolt cable between mac0 and mac2" in text


def test_a_mesh_of_more_than_eight_is_wired_as_a_ring() -> None:
    macs = addressed(mesh(9))
    assert macs_wired(macs).backend == "jaccl-ring"
    assert "9 ranks, and jaccl connects 8 at most in a mesh" in refused(macs, macs.facts())


def test_the_port_next_to_ethernet_is_passed_over_for_another_cable() -> None:
    macs = mesh(2, 2)
    macs.devices = [["en2", "en3"], ["en5", "en6"]]
    addressed(macs)
    wiring = macs_wired(macs)
    assert (wiring.backend, wiring.hosts[0].rdma, wiring.hosts[1].rdma) == (
        "jaccl",
        (None, "rdma_en3"),
        ("rdma_en6", None),
    )
    only = mesh(2)
    only.devices = [["en2"], ["en5"]]
    assert "mac0: en2 is the port next to Ethernet" in refused(only, addressed(only).facts())


def test_rows_and_addresses_of_the_configuration_are_taken_as_they_are() -> None:
    rows = [(None, "rdma_en8"), ("rdma_en9", None)]
    nodes = [node(f"mac{k}", ips=[f"172.16.0.{k + 1}"], rdma=row) for k, row in enumerate(rows)]
    macs = Macs([1, 1], [])
    wiring = wired(config(*nodes, backend="jaccl"), *macs.facts())
    assert [(host.ips, host.rdma) for host in wiring.hosts] == [
        (("172.16.0.1",), rows[0]),
        (("172.16.0.2",), rows[1]),
    ]
    with pytest.raises(LaunchError, match="mac1: RDMA is disabled"):
        wired(config(*nodes, backend="jaccl"), *changed(macs.facts(), 1, rdma_enabled=False))
    half = [nodes[0], nodes[1].model_copy(update={"rdma": (None, None)})]
    with pytest.raises(LaunchError, match="names no device towards"):
        wired(config(*half, backend="jaccl"), *macs.facts())


def test_ranks_of_one_machine_share_its_address_and_have_no_rdma() -> None:
    macs = addressed(mesh(2))
    nodes = [node("mac0"), node("again", "mac0.local"), node("mac1")]
    facts = macs.facts()
    three = [facts[0], facts[0].model_copy(update={"node": "again"}), facts[1]]
    found = topology(three)
    assert (found.nodes, found.shape) == (("mac0", "mac1"), "mesh")
    wiring = wire(config(*nodes), three, found)
    assert wiring.backend == "ring"
    assert [host.ips for host in wiring.hosts] == [("192.168.0.1",), ("192.168.0.1",), ("192.168.0.2",)]
    assert any("mac0, again" in text or "again, mac0" in text for text in wiring.warnings)


def test_one_machine_is_loopback_without_facts() -> None:
    wiring = wire(config(node("a", "127.0.0.1"), node("b", "127.0.0.1", ["127.0.0.2"])), (), Topology(nodes=("a",)))
    assert (wiring.backend, [host.ips for host in wiring.hosts]) == ("ring", [("127.0.0.1",), ("127.0.0.2",)])


def test_given_addresses_need_no_facts() -> None:
    nodes = [node("a", "u@a:2222", ["10.0.0.1"]), node("b", ips=["10.0.0.2"])]
    wiring = wire(config(*nodes, backend="ring"), (), Topology(nodes=("a", "b")))
    assert [(host.ssh, host.ips) for host in wiring.hosts] == [
        ("ssh://u@a:2222", ("10.0.0.1",)),
        ("b.local", ("10.0.0.2",)),
    ]


def test_the_network_that_all_share_is_taken_and_docker_is_not() -> None:
    docker = "docker0 172.17.0.1/16"
    wiring = wired(
        config(node("a"), node("b")),
        linux("a", docker, "eth0 10.0.0.1/24", "eth1 10.9.0.1/24"),
        linux("b", docker, "eth7 10.0.0.2/24"),
    )
    assert [host.ips for host in wiring.hosts] == [("10.0.0.1",), ("10.0.0.2",)]
    assert any("10.0.0.0/24 is shared by all (a eth0, b eth7)" in text for text in wiring.reasons)
    assert wiring.warnings == ()


def test_the_network_by_which_ssh_goes_is_preferred_then_one_without_a_radio() -> None:
    two = ("eth0 10.0.0.{}/24", "wlan0 10.1.0.{}/24")
    a, b = (linux(name, *(text.format(k) for text in two)) for k, name in ((1, "a"), (2, "b")))
    assert wired(config(node("a"), node("b")), a, b).hosts[1].ips == ("10.0.0.2",)
    by_ssh = [fact.model_copy(update={"host": f"10.1.0.{k}"}) for k, fact in ((1, a), (2, b))]
    wiring = wired(config(node("a", "10.1.0.1"), node("b", "u@10.1.0.2")), by_ssh[0], by_ssh[1])
    assert wiring.hosts[1].ips == ("10.1.0.2",)
    assert wiring.warnings == ("10.1.0.0/24 is Wi-Fi, which is slow for training",)


def test_of_networks_that_are_alike_one_is_taken_and_the_others_are_named() -> None:
    two = ("eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24")
    a, b = (linux(name, *(text.format(k) for text in two)) for k, name in ((1, "a"), (2, "b")))
    wiring = wired(config(node("a"), node("b")), a, b)
    assert wiring.hosts[0].ips == ("10.0.0.1",)
    assert any("10.1.0.0/24 would do as well" in text for text in wiring.reasons)


def test_an_address_that_only_one_node_gives_decides_the_others() -> None:
    two = ("eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24")
    a, b = (linux(name, *(text.format(k) for text in two)) for k, name in ((1, "a"), (2, "b")))
    wiring = wired(config(node("a", ips=["10.1.0.1"]), node("b")), a, b)
    assert [host.ips for host in wiring.hosts] == [("10.1.0.1",), ("10.1.0.2",)]


def test_loopback_does_for_one_machine_alone() -> None:
    a = linux("a", "eth0 10.0.0.1/24", ssh="127.0.0.1")
    wiring = wired(config(node("a", "127.0.0.1", ["127.0.0.1"]), node("b")), a, linux("b", "eth0 10.0.0.2/24"))
    assert [host.ips for host in wiring.hosts] == [("10.0.0.1",), ("10.0.0.2",)]
    assert wiring.warnings == ("a: 127.0.0.1 is not reached by the others",)


def test_no_shared_network_names_each_nodes_networks() -> None:
    with pytest.raises(LaunchError) as refusal:
        wired(config(node("a"), node("b")), linux("a", "eth0 10.0.0.1/24"), linux("b", "lo 127.0.0.1/8"))
    text = str(refusal.value)
    assert "a: 10.0.0.0/24 (eth0)" in text and "b: no address but its own" in text
    assert 'ips = ["…"] in its [[node]]' in text


def test_a_machine_that_is_named_in_two_ways_is_told_from_two() -> None:
    a, b, c = (linux(name, f"eth0 10.0.0.{ip}/24") for name, ip in (("a", 1), ("b", 1), ("c", 2)))
    with pytest.raises(LaunchError, match=r"a, b have the same addresses.*reached as a\.local and as b\.local"):
        wired(config(node("a"), node("b"), node("c")), a, b, c)


def test_a_node_that_did_not_answer_is_named_unless_its_address_is_given() -> None:
    a, b = linux("a", "eth0 10.0.0.1/24"), linux("b", problem="no answer on port 22")
    with pytest.raises(LaunchError, match="b: no address is known: b: no answer on port 22"):
        wired(config(node("a"), node("b")), a, b)
    wiring = wired(config(node("a"), node("b", ips=["10.0.0.9"])), a, b)
    assert [host.ips for host in wiring.hosts] == [("10.0.0.1",), ("10.0.0.9",)]


def test_a_ring_has_as_many_addresses_on_every_node() -> None:
    nodes = [node("a", ips=["10.0.0.1", "10.1.0.1"]), node("b", ips=["10.0.0.2"])]
    with pytest.raises(LaunchError, match="as many addresses on every node: a has 2, b has 1"):
        wire(config(*nodes, backend="ring"), (), Topology(nodes=("a", "b")))


def test_a_thunderbolt_bridge_is_better_than_ethernet_for_tcp() -> None:
    macs = mesh(2)
    facts = []
    for number, fact in enumerate(macs.facts(rdma_enabled=False)):
        bridged = [
            port.model_copy(update={"bridge": "bridge0"}) if port.name == "en3" else port for port in fact.interfaces
        ]
        bridge = Interface(name="bridge0", ipv4=(f"192.168.7.{number + 1}/24",), active=True)
        rest = [port for port in bridged if port.name != "bridge0"]
        facts.append(fact.model_copy(update={"interfaces": (*rest, bridge)}))
    wiring = macs_wired(macs, facts)
    assert [host.ips for host in wiring.hosts] == [("192.168.7.1",), ("192.168.7.2",)]
    assert any("Thunderbolt 192.168.7.0/24" in text for text in wiring.reasons)


def test_cables_without_addresses_are_not_used_and_it_is_said() -> None:
    macs = mesh(2)
    wiring = macs_wired(macs, macs.facts(rdma_enabled=False))
    assert [host.ips for host in wiring.hosts] == [("10.0.0.1",), ("10.0.0.2",)]
    assert any("the Thunderbolt cables are not used" in text for text in wiring.warnings)


def test_cuda_is_nccl_and_says_whether_there_is_infiniband() -> None:
    cuda: dict[str, Any] = {"gpu": "gpu", "backends": ("ring", "nccl")}
    active = (RdmaDevice(name="mlx5_0", port_state="PORT_ACTIVE"),)
    a, b = linux("a", "ib0 10.0.0.1/24", **cuda, rdma_devices=active), linux("b", "ib0 10.0.0.2/24", **cuda)
    wiring = wired(config(node("a"), node("b")), a, b)
    assert (wiring.backend, wiring.hosts[0].ips) == ("nccl", ("10.0.0.1",))
    assert "TCP and no InfiniBand: b has no active device" in wiring.reasons
    both = wired(config(node("a"), node("b")), a, b.model_copy(update={"rdma_devices": active}))
    assert "InfiniBand: a mlx5_0, b mlx5_0" in both.reasons
    assert (wiring.infiniband, both.infiniband) == (False, True)


def test_set_up_commands_leave_networks_alone_that_are_there_and_what_is_set_up() -> None:
    macs = mesh(2)
    lan = Interface(name="en1", ipv4=("192.168.0.20/24",), active=True)
    facts = [fact.model_copy(update={"interfaces": (*fact.interfaces, lan)}) for fact in macs.facts()]
    commands = setup_commands(topology(facts), facts)
    assert commands["mac0"] == [
        "sudo ifconfig bridge0 down",
        "sudo ifconfig en3 inet 192.168.1.1 netmask 255.255.255.252",
        "sudo route change 192.168.1.2 -interface en3",
    ]
    done = addressed(macs).facts()
    assert setup_commands(topology(done), done) == {}
