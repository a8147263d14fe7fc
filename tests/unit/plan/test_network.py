"""Which backend and which addresses a cluster gets, and what is said when it cannot be."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.calibration.calibrate import connected_as
from engine.cluster.topology import topology
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.errors import ENABLE_RDMA, LaunchError
from engine.models import Failed, Interface, Late, NodeFacts, NvidiaGpu, RdmaDevice, Topology, Unparsable
from engine.plan.addresses import setup_commands, setup_script
from engine.plan.network import NetworkPlan, plan_network
from tests.unit.cluster.macs import NOW, Macs, mesh, ring
from tests.unit.plan.test_against_mlx import addressed


def config(*nodes: NodeConfig, backend: str = "auto") -> Config:
    cluster = ClusterConfig.model_validate({"backend": backend})
    return Config(cluster=cluster, nodes=nodes, job=JobConfig(name="job", command=("true",)))


def node(name: str, ssh: str | None = None, ips: Sequence[str] = (), **fields: Any) -> NodeConfig:
    return NodeConfig(name=name, ssh=ssh or f"{name}.local", ips=tuple(ips), python="/p", workdir="/", **fields)


def linux(name: str, *addresses: str, ssh: str | None = None, **fields: Any) -> NodeFacts:
    """A node with these addresses, "eth0 10.0.0.1/24"."""
    named = [address.split() for address in addresses]
    interfaces = tuple(Interface(name=device, ipv4=(ip,), active=True) for device, ip in named)
    plain: dict[str, Any] = {"system": "Linux", "interfaces": interfaces, "backends": ("ring",), "gpu": "cpu"}
    return NodeFacts(node=name, host=ssh or f"{name}.local", probed_at=NOW, **(plain | fields))


def wired(config: Config, *facts: NodeFacts) -> NetworkPlan:
    return plan_network(config, facts, topology(facts))


def macs_wired(macs: Macs, facts: Sequence[NodeFacts] | None = None, backend: str = "auto") -> NetworkPlan:
    facts = facts or macs.facts()
    return wired(config(*(node(name) for name in macs.names), backend=backend), *facts)


def changed(facts: Sequence[NodeFacts], which: int, **changes: Any) -> list[NodeFacts]:
    return [fact.model_copy(update=changes) if number == which else fact for number, fact in enumerate(facts)]


def refused(macs: Macs, facts: Sequence[NodeFacts], backend: str = "jaccl") -> str:
    with pytest.raises(LaunchError) as refusal:
        macs_wired(macs, facts, backend)
    return str(refusal.value)


OBSTACLES: list[tuple[dict[str, Any], str]] = [
    ({"rdma_enabled": False}, f"mac1: RDMA is disabled: {ENABLE_RDMA}"),
    (
        {"rdma_enabled": None, "unknown": {"rdma_ctl": Late(command="rdma_ctl status", after_s=4)}},
        "mac1: cannot tell whether RDMA is enabled: rdma_ctl status gave no answer within 4 s",
    ),
    ({"os_version": "26.1"}, "mac1: macOS 26.1 is too old for RDMA: update to 26.2"),
    ({"os_version": "15.7.3", "os_build": "24G1"}, "mac1: macOS 15.7.3 is too old for RDMA: update to 26.2"),
    ({"os_build": "25E999"}, "macOS builds differ (26.4.1 (25E253) on mac0; 26.4.1 (25E999) on mac1)"),
    ({"chip": "Apple M4"}, "mac1: Apple M4 has Thunderbolt 4: RDMA needs 5"),
    ({"backends": ("ring",), "mlx": "0.30.0"}, "mac1: MLX 0.30.0 was built without jaccl"),
    ({"problem": "no answer on port 22"}, "mac1: facts not known: no answer on port 22"),
    ({"rdma_devices": (RdmaDevice(name="rdma_en3", port_state="PORT_DOWN"),)}, "mac1: rdma_en3 is PORT_DOWN"),
    ({"rdma_devices": (RdmaDevice(name="rdma_en9"),)}, "mac1: device rdma_en3 does not exist"),
    ({"rdma_devices": (RdmaDevice(name="rdma_en3", ipv4_gid=False),)}, "mac1: rdma_en3 has no IPv4 address in its"),
    (
        {"interfaces": (Interface(name="en0", ipv4=("10.0.0.2/24",)), Interface(name="en3", bridge="bridge0"))},
        "mac1: en3 has no IPv4 address (a member of bridge0)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "obstacle"), OBSTACLES, ids=[obstacle for _, obstacle in OBSTACLES])
def test_an_obstacle_to_rdma_is_a_warning_unless_rdma_is_configured(changes: dict[str, Any], obstacle: str) -> None:
    macs = addressed(mesh(2))
    facts = changed(macs.facts(), 1, **changes)
    assert obstacle in refused(macs, facts)
    assert obstacle in refused(macs, facts, "jaccl-ring")
    if "problem" not in changes:
        network = macs_wired(macs, facts)
        assert network.backend == "ring"
        assert any(obstacle in text for text in network.warnings)
        assert all(host.rdma is None and host.ips for host in network.hosts)


def test_every_node_with_an_obstacle_is_named() -> None:
    macs = addressed(mesh(3))
    text = refused(macs, macs.facts(rdma_enabled=False))
    assert all(f"mac{number}: RDMA is disabled" in text for number in range(3))


def test_missing_pairs_are_named() -> None:
    macs = addressed(ring(4))
    text = refused(macs, macs.facts())
    assert "the nodes do not form a full mesh: no Thunderbolt cable between mac0 and mac2, mac1 and mac3" in text
    line = Macs([1, 2, 1], [((0, 0), (1, 0)), ((1, 1), (2, 0))])
    text = refused(addressed(line), addressed(line).facts(), "jaccl-ring")
    assert "the nodes do not form a ring in their order: no Thunderbolt cable between mac0 and mac2" in text


def test_a_mesh_of_more_than_eight_becomes_a_ring() -> None:
    macs = addressed(mesh(9))
    assert macs_wired(macs).backend == "jaccl-ring"
    assert "9 ranks: jaccl connects at most 8 in a mesh" in refused(macs, macs.facts())


def test_the_port_next_to_ethernet_is_passed_over_for_another_cable() -> None:
    macs = mesh(2, 2)
    macs.devices = [["en2", "en3"], ["en5", "en6"]]
    addressed(macs)
    network = macs_wired(macs)
    assert (network.backend, network.hosts[0].rdma, network.hosts[1].rdma) == (
        "jaccl",
        (None, "rdma_en3"),
        ("rdma_en6", None),
    )
    only = mesh(2)
    only.devices = [["en2"], ["en5"]]
    assert "mac0: en2 is the port next to Ethernet" in refused(only, addressed(only).facts())


def test_configured_rows_and_addresses_are_used_unchanged() -> None:
    rows = [(None, "rdma_en8"), ("rdma_en9", None)]
    nodes = [node(f"mac{k}", ips=[f"172.16.0.{k + 1}"], rdma=row) for k, row in enumerate(rows)]
    macs = Macs([1, 1], [])
    network = wired(config(*nodes, backend="jaccl"), *macs.facts())
    assert [(host.ips, host.rdma) for host in network.hosts] == [
        (("172.16.0.1",), rows[0]),
        (("172.16.0.2",), rows[1]),
    ]
    with pytest.raises(LaunchError, match="mac1: RDMA is disabled"):
        wired(config(*nodes, backend="jaccl"), *changed(macs.facts(), 1, rdma_enabled=False))
    half = [nodes[0], nodes[1].model_copy(update={"rdma": (None, None)})]
    with pytest.raises(LaunchError, match="has no device for"):
        wired(config(*half, backend="jaccl"), *macs.facts())


def test_ranks_of_one_machine_share_its_address_and_have_no_rdma() -> None:
    macs = addressed(mesh(2))
    nodes = [node("mac0"), node("again", "mac0.local"), node("mac1")]
    facts = macs.facts()
    three = [facts[0], facts[0].model_copy(update={"node": "again"}), facts[1]]
    found = topology(three)
    assert (found.nodes, found.shape) == (("mac0", "mac1"), "mesh")
    network = plan_network(config(*nodes), three, found)
    assert network.backend == "ring"
    assert [host.ips for host in network.hosts] == [("192.168.0.1",), ("192.168.0.1",), ("192.168.0.2",)]
    assert any("mac0, again" in text or "again, mac0" in text for text in network.warnings)


def test_one_machine_is_loopback_without_facts() -> None:
    network = plan_network(
        config(node("a", "127.0.0.1"), node("b", "127.0.0.1", ["127.0.0.2"])), (), Topology(nodes=("a",))
    )
    assert (network.backend, [host.ips for host in network.hosts]) == ("ring", [("127.0.0.1",), ("127.0.0.2",)])


def test_given_addresses_need_no_facts() -> None:
    nodes = [node("a", "u@a:2222", ["10.0.0.1"]), node("b", ips=["10.0.0.2"])]
    network = plan_network(config(*nodes, backend="ring"), (), Topology(nodes=("a", "b")))
    assert [(host.ssh, host.ips) for host in network.hosts] == [
        ("ssh://u@a:2222", ("10.0.0.1",)),
        ("b.local", ("10.0.0.2",)),
    ]


def test_the_network_that_all_share_is_taken_and_docker_is_not() -> None:
    docker = "docker0 172.17.0.1/16"
    network = wired(
        config(node("a"), node("b")),
        linux("a", docker, "eth0 10.0.0.1/24", "eth1 10.9.0.1/24"),
        linux("b", docker, "eth7 10.0.0.2/24"),
    )
    assert [host.ips for host in network.hosts] == [("10.0.0.1",), ("10.0.0.2",)]
    assert any("all nodes share the network 10.0.0.0/24 (a eth0, b eth7)" in text for text in network.reasons)
    assert network.warnings == ()


def test_the_network_by_which_ssh_goes_is_preferred_then_one_without_a_radio() -> None:
    two = ("eth0 10.0.0.{}/24", "wlan0 10.1.0.{}/24")
    a, b = (linux(name, *(text.format(k) for text in two)) for k, name in ((1, "a"), (2, "b")))
    assert wired(config(node("a"), node("b")), a, b).hosts[1].ips == ("10.0.0.2",)
    by_ssh = [fact.model_copy(update={"host": f"10.1.0.{k}"}) for k, fact in ((1, a), (2, b))]
    network = wired(config(node("a", "10.1.0.1"), node("b", "u@10.1.0.2")), by_ssh[0], by_ssh[1])
    assert network.hosts[1].ips == ("10.1.0.2",)
    assert network.warnings == ("10.1.0.0/24 is Wi-Fi, which is slow for training",)


def test_a_vpn_is_taken_only_where_there_is_nothing_else() -> None:
    two = ("en0 192.168.1.{}/24", "utun4 10.8.0.{}/24")
    a, b = (linux(name, *(text.format(k) for text in two)) for k, name in ((1, "a"), (2, "b")))
    # Also where ssh goes by it.
    for nodes in ((node("a"), node("b")), (node("a", "10.8.0.1"), node("b", "10.8.0.2"))):
        seen = [fact.model_copy(update={"host": one.ssh}) for fact, one in zip((a, b), nodes, strict=True)]
        network = wired(config(*nodes), *seen)
        assert (network.hosts[1].ips, network.warnings) == (("192.168.1.2",), ())
    alone = wired(config(node("a"), node("b")), linux("a", "wg0 10.8.0.1/24"), linux("b", "wg0 10.8.0.2/24"))
    assert alone.warnings == ("10.8.0.0/24 is a VPN, which is slow for training",)


def test_a_wifi_on_which_ranks_only_find_each_other_is_no_warning() -> None:
    macs = addressed(mesh(2))
    facts = [
        fact.model_copy(
            update={
                "interfaces": tuple(
                    port.model_copy(update={"port_name": "Wi-Fi"}) if port.name == "en0" else port
                    for port in fact.interfaces
                )
            }
        )
        for fact in macs.facts()
    ]
    network = macs_wired(macs, facts)
    assert (network.backend, network.hosts[0].ips, network.warnings) == ("jaccl", ("10.0.0.1",), ())


def test_equally_good_networks_are_named_in_the_reason() -> None:
    two = ("eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24")
    a, b = (linux(name, *(text.format(k) for text in two)) for k, name in ((1, "a"), (2, "b")))
    network = wired(config(node("a"), node("b")), a, b)
    assert network.hosts[0].ips == ("10.0.0.1",)
    assert any("10.1.0.0/24 would work as well" in text for text in network.reasons)


def test_an_address_that_only_one_node_gives_decides_the_others() -> None:
    two = ("eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24")
    a, b = (linux(name, *(text.format(k) for text in two)) for k, name in ((1, "a"), (2, "b")))
    network = wired(config(node("a", ips=["10.1.0.1"]), node("b")), a, b)
    assert [host.ips for host in network.hosts] == [("10.1.0.1",), ("10.1.0.2",)]


def test_loopback_does_for_one_machine_alone() -> None:
    a = linux("a", "eth0 10.0.0.1/24", ssh="127.0.0.1")
    network = wired(config(node("a", "127.0.0.1", ["127.0.0.1"]), node("b")), a, linux("b", "eth0 10.0.0.2/24"))
    assert [host.ips for host in network.hosts] == [("10.0.0.1",), ("10.0.0.2",)]
    assert network.warnings == ("a: the other nodes cannot reach 127.0.0.1",)


def test_no_shared_network_names_each_nodes_networks() -> None:
    with pytest.raises(LaunchError) as refusal:
        wired(config(node("a"), node("b")), linux("a", "eth0 10.0.0.1/24"), linux("b", "lo 127.0.0.1/8"))
    text = str(refusal.value)
    assert "a: 10.0.0.0/24 (eth0)" in text and "b: only loopback and link-local addresses" in text
    assert 'ips = ["…"] in its [[node]]' in text


def test_a_machine_with_two_names_is_recognised() -> None:
    a, b, c = (linux(name, f"eth0 10.0.0.{ip}/24") for name, ip in (("a", 1), ("b", 1), ("c", 2)))
    with pytest.raises(LaunchError, match=r"a, b have the same addresses.*reached as a\.local and as b\.local"):
        wired(config(node("a"), node("b"), node("c")), a, b, c)


def test_a_node_that_did_not_answer_is_named_unless_its_address_is_given() -> None:
    a, b = linux("a", "eth0 10.0.0.1/24"), linux("b", problem="no answer on port 22")
    with pytest.raises(LaunchError, match="no address is known: b: no answer on port 22"):
        wired(config(node("a"), node("b")), a, b)
    network = wired(config(node("a"), node("b", ips=["10.0.0.9"])), a, b)
    assert [host.ips for host in network.hosts] == [("10.0.0.1",), ("10.0.0.9",)]


def test_a_ring_has_as_many_addresses_on_every_node() -> None:
    nodes = [node("a", ips=["10.0.0.1", "10.1.0.1"]), node("b", ips=["10.0.0.2"])]
    with pytest.raises(LaunchError, match="the same number of addresses on every node: a has 2, b has 1"):
        plan_network(config(*nodes, backend="ring"), (), Topology(nodes=("a", "b")))


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
    network = macs_wired(macs, facts)
    assert [host.ips for host in network.hosts] == [("192.168.7.1",), ("192.168.7.2",)]
    assert any("the Thunderbolt network 192.168.7.0/24" in text for text in network.reasons)


def test_cables_without_addresses_are_not_used_with_a_warning() -> None:
    macs = mesh(2)
    network = macs_wired(macs, macs.facts(rdma_enabled=False))
    assert [host.ips for host in network.hosts] == [("10.0.0.1",), ("10.0.0.2",)]
    assert any("their ends have no addresses in a common network" in text for text in network.warnings)


def test_cables_with_addresses_in_another_order_are_not_said_to_have_none() -> None:
    macs = addressed(ring(4, [0, 2, 1, 3]))
    network = macs_wired(macs, with_tcp(macs.facts()))
    assert network.hosts[0].ips == ("10.0.0.1",)
    assert "the Thunderbolt cables are not used: they do not join each rank with the next" in network.warnings
    assert any("form a ring in the order mac0, mac2, mac1, mac3" in text for text in network.warnings)


def test_cuda_is_nccl_and_says_whether_there_is_infiniband() -> None:
    cuda: dict[str, Any] = {"gpu": "gpu", "backends": ("ring", "nccl"), "gpus": (NvidiaGpu(name="NVIDIA L4"),)}
    active = (RdmaDevice(name="mlx5_0", port_state="PORT_ACTIVE"),)
    a, b = linux("a", "ib0 10.0.0.1/24", **cuda, rdma_devices=active), linux("b", "ib0 10.0.0.2/24", **cuda)
    network = wired(config(node("a"), node("b")), a, b)
    assert (network.backend, network.hosts[0].ips) == ("nccl", ("10.0.0.1",))
    assert "TCP, not InfiniBand: no active device on b" in network.reasons
    both = wired(config(node("a"), node("b")), a, b.model_copy(update={"rdma_devices": active}))
    assert "InfiniBand: a mlx5_0, b mlx5_0" in both.reasons
    assert (network.infiniband, both.infiniband) == (False, True)


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


def test_a_bridge_with_link_local_addresses_only_is_no_network_and_comes_with_the_set_up() -> None:
    """As macOS gives a bridge without DHCP (RFC 3927): two of them need not be one network."""
    macs = mesh(2)
    facts = [
        fact.model_copy(
            update={
                "rdma_enabled": False,
                "interfaces": (
                    *(port.model_copy(update={"bridge": "bridge0"}) for port in fact.interfaces if port.name != "en0"),
                    Interface(name="bridge0", ipv4=(f"169.254.7.{number + 1}/16",), active=True, bridge="bridge0"),
                ),
            }
        )
        for number, fact in enumerate(macs.facts())
    ]
    with pytest.raises(LaunchError, match=r"no network in common.*flightdeck nodes --setup"):
        macs_wired(macs, facts)
    assert list(setup_commands(topology(facts), facts)) == ["mac0", "mac1"]


def test_where_addresses_are_not_known_none_are_given() -> None:
    macs = mesh(2)
    late = changed(macs.facts(), 1, interfaces=(), unknown={"ifconfig": Late(command="ifconfig -a", after_s=4)})
    assert setup_commands(topology(late), late) == {}


def test_the_set_up_asks_for_a_password_once_and_goes_on_without_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    for name, text in {
        "sudo": f'echo sudo >>{log}\nexec "$@"',
        "ifconfig": f'kill -HUP $PPID\necho ifconfig "$@" >>{log}',
        "route": f'echo route "$@" >>{log}\nexit 1',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    macs = mesh(2)
    commands = setup_commands(topology(macs.facts()), macs.facts())["mac0"]
    subprocess.run(["/bin/sh", "-c", setup_script(commands)], check=False)
    assert log.read_text().splitlines() == ["sudo", *(line.removeprefix("sudo ") for line in commands)]


LATE = Late(command="system_profiler SPThunderboltDataType -json", after_s=4)


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        (LATE, "system_profiler SPThunderboltDataType -json gave no answer within 4 s"),
        (Failed(command="system_profiler", exit_code=1, stderr="no such type"), "ended with 1: no such type"),
        (Unparsable(command="system_profiler", output="[1, 2"), "printed what cannot be read: [1, 2"),
    ],
)
def test_cables_that_are_not_known_are_not_missing(why: Late | Failed | Unparsable, reason: str) -> None:
    macs = addressed(mesh(3))
    facts = changed(macs.facts(), 1, thunderbolt=(), unknown={"thunderbolt": why})
    found = topology(facts)
    assert (found.shape, found.missing, found.strangers) == ("unknown", (), ())
    assert reason in found.unknown["mac1"]
    text = refused(macs, facts)
    assert f"mac1: its Thunderbolt cables are not known: {why}" in text
    assert "no Thunderbolt cable between" not in text


def test_cables_that_are_not_known_do_not_block_another_backend() -> None:
    macs = addressed(mesh(2))
    facts = changed(macs.facts(), 1, thunderbolt=(), unknown={"thunderbolt": LATE})
    network = macs_wired(macs, facts)
    assert network.backend == "ring"
    assert any("mac1: its Thunderbolt cables are not known" in text for text in network.warnings)


def test_a_rank_order_with_given_devices_needs_no_cables() -> None:
    """Rows that the configuration gives are taken as they are."""
    macs = addressed(mesh(2))
    facts = changed(macs.facts(), 1, thunderbolt=(), unknown={"thunderbolt": LATE})
    nodes = [node("mac0", rdma=(None, "rdma_en3")), node("mac1", rdma=("rdma_en3", None))]
    assert wired(config(*nodes, backend="jaccl"), *facts).backend == "jaccl"


@pytest.mark.parametrize("name", ["ifconfig", "ip"])
def test_addresses_that_are_not_known_are_not_taken_for_none(name: str) -> None:
    macs = addressed(mesh(2))
    late = Late(command=name, after_s=4)
    interfaces = (Interface(name="en3"),)
    facts = changed(macs.facts(), 1, interfaces=interfaces, thunderbolt=(), unknown={name: late})
    with pytest.raises(LaunchError) as refusal:
        macs_wired(macs, facts, "ring")
    assert str(refusal.value).startswith(f"mac1: the addresses are not known: mac1: {name} gave no answer within 4 s")
    assert "no network is shared" not in str(refusal.value)
    given = [node("mac0", ips=("10.0.0.1",)), node("mac1", ips=("10.0.0.2",))]
    assert [host.ips for host in wired(config(*given, backend="ring"), *facts).hosts] == [("10.0.0.1",), ("10.0.0.2",)]


def test_an_interface_whose_addresses_are_not_known_is_not_in_the_way_of_rdma() -> None:
    macs = addressed(mesh(2))
    late = Late(command="ifconfig -a", after_s=4)
    facts = changed(macs.facts(), 1, interfaces=(Interface(name="en3"),), unknown={"ifconfig": late})
    with pytest.raises(LaunchError) as refusal:
        macs_wired(macs, facts, "jaccl")
    assert "the addresses are not known" in str(refusal.value) and "of its own" not in str(refusal.value)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_local_takes_tcp_although_rdma_is_there(ranks: int) -> None:
    macs = addressed(mesh(ranks))
    deck = config(*(node(name, ips=[f"10.0.0.{rank}"]) for rank, name in enumerate(macs.names, start=1)))
    facts = macs.facts()
    assert wired(deck, *facts).backend == "jaccl"
    local = plan_network(deck, facts, topology(facts), "local")
    assert local.backend == "ring" and not local.warnings and "RDMA is of no use to it" in local.reasons[0]
    job = deck.job.model_copy(update={"strategy": "local"})
    assert local == wired(deck.model_copy(update={"job": job}), *facts)
    assert [host.rdma for host in local.hosts] == [None] * ranks
    assert connected_as(deck, facts, local) == ("local",)
    assert connected_as(deck, facts, wired(deck, *facts)) == ("data",)
    tcp = with_tcp(facts)
    assert connected_as(deck, tcp, wired(deck, *tcp)) == ("data", "local")


def test_of_three_local_ranks_none_is_at_an_address_that_one_neighbour_alone_reaches() -> None:
    """Cables have a network each; rank 0 must be reached by all."""
    macs = addressed(mesh(3))
    shared = [
        fact.model_copy(
            update={"interfaces": (*fact.interfaces, Interface(name="en0", ipv4=(f"10.0.0.{rank}/24",), active=True))}
        )
        for rank, fact in enumerate(macs.facts(), start=1)
    ]
    deck = config(*(node(name) for name in macs.names))
    assert all(ip.startswith("192.168.") for host in wired(deck, *with_tcp(shared)).hosts for ip in host.ips)
    assert connected_as(deck, with_tcp(shared), wired(deck, *with_tcp(shared))) == ("data",)
    local = plan_network(deck, shared, topology(shared), "local")
    assert [host.ips for host in local.hosts] == [("10.0.0.1",), ("10.0.0.2",), ("10.0.0.3",)]
    assert not local.warnings


def test_three_local_ranks_take_the_thunderbolt_network_that_all_of_them_share() -> None:
    macs = mesh(3)
    facts = [
        fact.model_copy(
            update={
                "interfaces": (
                    *(Interface(name=port.device, bridge="bridge0") for port in fact.thunderbolt if port.device),
                    Interface(name="bridge0", ipv4=(f"10.1.0.{rank}/24",), bridge="bridge0", active=True),
                    Interface(name="en0", ipv4=(f"10.0.0.{rank}/24",), active=True),
                )
            }
        )
        for rank, fact in enumerate(macs.facts(), start=1)
    ]
    deck = config(*(node(name) for name in macs.names))
    local = plan_network(deck, facts, topology(facts), "local")
    assert [host.ips for host in local.hosts] == [("10.1.0.1",), ("10.1.0.2",), ("10.1.0.3",)]
    uneven = config(*(node(name, ips=["10.0.0.1", "10.0.0.9"][: 1 + (name == macs.names[0])]) for name in macs.names))
    with pytest.raises(LaunchError, match="the same number of addresses on every node"):
        plan_network(uneven, facts, topology(facts), "local")


def with_tcp(facts: Sequence[NodeFacts]) -> list[NodeFacts]:
    """The same Macs without RDMA."""
    return [fact.model_copy(update={"rdma_enabled": False}) for fact in facts]


def test_a_configured_backend_that_local_has_no_use_for_is_refused() -> None:
    macs = addressed(mesh(2))
    facts = macs.facts()
    deck = config(*(node(name) for name in macs.names), backend="jaccl")
    with pytest.raises(LaunchError, match=r"jaccl is not possible.*TCP connections of its own.*backend = \"ring\""):
        plan_network(deck, facts, topology(facts), "local")


def test_torch_takes_nccl_if_nvidia_smi_lists_a_gpu_for_each_rank_and_else_says_why_not() -> None:
    gpus: dict[str, Any] = {"gpus": (NvidiaGpu(name="NVIDIA H100 80GB HBM3"),) * 2}
    seen = [linux("a", "eth0 10.0.0.1/24", **gpus), linux("b", "eth0 10.0.0.2/24", **gpus)]

    def planned(*facts: NodeFacts, processes: int = 2) -> NetworkPlan:
        deck = config(*(node(fact.node, processes=processes) for fact in facts))
        job = deck.job.model_copy(update={"framework": "torch", "elastic": True})
        return wired(deck.model_copy(update={"job": job}), *facts)

    assert planned(*seen).backend == "nccl"
    network = planned(*seen, processes=4)
    assert (network.backend, network.reasons[0]) == (
        "gloo",
        "not known to have an NVIDIA GPU for each rank: a, b (nvidia-smi lists 2 GPUs for 4 ranks)",
    )
    late = Late(command="nvidia-smi", after_s=4.0)
    network = planned(seen[0], seen[1].model_copy(update={"gpus": (), "unknown": {"nvidia_smi": late}}))
    assert network.reasons[0].endswith("for each rank: b (nvidia-smi gave no answer within 4 s)")
    assert planned(seen[0], seen[1].model_copy(update={"gpus": ()})).backend == "gloo"


@pytest.mark.parametrize(("framework", "other"), [("torch", "gloo"), ("mlx", "ring")])
def test_more_ranks_of_nccl_than_gpus_are_refused_by_the_names_of_their_nodes(framework: str, other: str) -> None:
    h100, one = NvidiaGpu(name="NVIDIA H100 80GB HBM3"), {"ssh": "box.local"}
    deck = config(node("box.0", **one), node("box.1", **one), node("c"), backend="nccl")
    deck = deck.model_copy(update={"job": deck.job.model_copy(update={"framework": framework})})

    def planned(*gpus: NvidiaGpu, **fields: Any) -> str:
        box = [linux(name, "eth0 10.0.0.1/24", gpu="gpu", **one, gpus=gpus, **fields) for name in ("box.0", "box.1")]
        return wired(deck, *box, linux("c", "eth0 10.0.0.2/24", gpu="gpu", gpus=(h100,))).backend

    with pytest.raises(LaunchError) as refusal:
        planned(h100)
    assert str(refusal.value) == (
        "nccl is not possible: it needs a GPU for each rank: box.0 to box.1 (nvidia-smi lists 1 GPU for 2 ranks) "
        f'(plan fewer ranks on that machine, or set backend = "{other}" in [cluster])'
    )
    assert planned(h100, h100) == "nccl"
    assert planned(h100.model_copy(update={"mig": True})) == "nccl", "nvidia-smi does not list its instances"
    assert planned(unknown={"nvidia_smi": Late(command="nvidia-smi", after_s=4.0)}) == "nccl", "not known"
