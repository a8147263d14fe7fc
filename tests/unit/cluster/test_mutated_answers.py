"""Whatever a Mac's commands print (cut, empty, late, in another language, with other keys): the facts are read, nothing
is raised, and what could not be read is not taken for something that is not there."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.cluster.facts import read_facts
from engine.cluster.topology import topology
from engine.errors import LaunchError
from engine.models import NodeFacts
from engine.node.probes.facts import MAC_COMMANDS
from engine.plan.network import plan_network
from tests.cluster.mac.personality import documents
from tests.unit.cluster.macs import NOW, Cabled
from tests.unit.plan.test_against_mlx import config

MACS = Cabled(documents(["mac0", "mac1", "mac2"], ["m4-max-128"], "mesh"))
TRUE = [MACS.answers(mac) for mac in range(3)]
WORDS = {"Thunderbolt": "雷雳", "Ethernet": "以太网", "inet": "dirección", "status": "état", "member": "membre",
         "page size": "Seitengröße", "Device": "Gerät", "state": "Zustand", "enabled": "activé"}  # fmt: skip

Report = dict[str, Any]
Mutation = Callable[[random.Random, Report, str], None]


def cut(chance: random.Random, report: Report, name: str) -> None:
    text = report["answers"][name]
    report["answers"][name] = text[: chance.randrange(len(text) + 1)]


def empty(chance: random.Random, report: Report, name: str) -> None:
    report["answers"][name] = chance.choice(["", "\n", "{}", "[]", "null", "\0" * 10])


def late(chance: random.Random, report: Report, name: str) -> None:
    del chance, report["answers"][name]
    report["unknown"][name] = {"command": " ".join(MAC_COMMANDS.get(name, [name])), "late_s": 4.0}


def failing(chance: random.Random, report: Report, name: str) -> None:
    cut(chance, report, name)
    code = chance.choice([-9, 1, 64, 255])
    report["unknown"][name] = {
        "command": name,
        "exit_code": code,
        "stderr": chance.choice(["", "Killed: 9", "\x1b[31mé"]),
    }


def locale(chance: random.Random, report: Report, name: str) -> None:
    del chance
    for word, other in WORDS.items():
        report["answers"][name] = report["answers"][name].replace(word, other)


def renamed(chance: random.Random, report: Report, name: str) -> None:
    """One key of the output has another name everywhere."""
    text = report["answers"][name]
    keys = sorted({*re.findall(r'"(\w+)"\s*:', text), *re.findall(r"^\s*([\w. -]+):", text, re.MULTILINE)})
    if keys:
        report["answers"][name] = text.replace(chance.choice(keys), "renamed")


def swapped(chance: random.Random, report: Report, name: str) -> None:
    """Another type than text, or the output of another command."""
    others: list[Any] = [None, 7, ["x"], {"a": 1}, *report["answers"].values()]
    report["answers"][name] = chance.choice(others)


def noise(chance: random.Random, report: Report, name: str) -> None:
    text = report["answers"][name]
    at = chance.randrange(len(text) + 1)
    report["answers"][name] = text[:at] + "".join(chr(chance.randrange(0x300)) for _ in range(20)) + text[at:]


MUTATIONS: list[Mutation] = [cut, empty, late, failing, locale, renamed, swapped, noise]


def mutated(seed: int) -> tuple[str, Report]:
    """Which mutation of which answers, and the report with them."""
    chance = random.Random(seed)
    report: Report = {"system": "Darwin", "answers": dict(TRUE[0]), "unknown": {}}
    changed = []
    for name in chance.sample(sorted(report["answers"]), chance.choice([1, 1, 1, 2, 5])):
        mutation = chance.choice(MUTATIONS)
        mutation(chance, report, name)
        changed.append(f"{mutation.__name__} {name}")
    return ", ".join(changed), json.loads(json.dumps(report))


def claims(seed: int) -> tuple[str, list[str]]:
    """The mutation, and what is reported absent though nobody could know."""
    changed, report = mutated(seed)
    fact = NodeFacts(node="mac0", host="mac0.local", probed_at=NOW, **read_facts(report))
    facts = [fact, *(MACS.fact(mac) for mac in (1, 2))]
    found = topology(facts)
    wrong = []
    if found.missing:
        wrong.append(f"no cable {found.missing}")
    if fact.rdma_enabled is False and report["answers"].get("rdma_ctl") != "disabled\n":
        wrong.append("RDMA is off")
    try:
        warnings = plan_network(config(MACS), facts, found).warnings
    except LaunchError as error:
        warnings = (str(error),)
    # Noise may have made another number, and another Mac's output is one of a Mac.
    if not {"noise", "swapped"} & {*changed.replace(",", "").split()}:
        wrong += [text for text in warnings if re.search("has no IPv4|does not exist|in common$|builds differ", text)]
    return changed, wrong


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_answers_are_read_and_no_absence_is_claimed(count: int) -> None:
    wrong = {seed: found for seed in range(count) if (found := claims(seed))[1]}
    assert not wrong, (len(wrong), list(wrong.items())[:8])


def with_answer(**changed: str) -> NodeFacts:
    """mac0 with other answers to these commands."""
    fields = read_facts({"system": "Darwin", "answers": TRUE[0] | changed})
    return NodeFacts(node="mac0", host="mac0.local", probed_at=NOW, **fields)


@pytest.mark.parametrize("key", ["domain_uuid_key", "SPThunderboltDataType"])
def test_buses_of_which_nothing_is_known_are_no_buses_without_cables(key: str) -> None:
    fact = with_answer(thunderbolt=TRUE[0]["thunderbolt"].replace(key, "renamed"))
    assert "printed what cannot be read" in str(fact.unknown["thunderbolt"])


def test_a_cable_that_only_its_other_end_reports_is_not_known() -> None:
    fact = with_answer(thunderbolt=TRUE[0]["thunderbolt"].replace("_items", "renamed"))
    found = topology([fact, MACS.fact(1), MACS.fact(2)])
    assert (found.shape, found.missing) == ("unknown", ())
    assert found.unknown == {"mac0": "mac1 sees a cable to it that it does not report"}
    alone = topology([fact.model_copy(update={"thunderbolt": ()}), MACS.fact(1).model_copy(update={"thunderbolt": ()})])
    assert alone.missing == (("mac0", "mac1"),)


def test_interfaces_that_ifconfig_did_not_come_to_have_no_known_addresses() -> None:
    whole = TRUE[0]["ifconfig"]
    assert with_answer().unknown == {}
    for end in (whole.index("en4: "), whole.index("inet 192.168.0"), whole.rindex("status: active")):
        fact = with_answer(ifconfig=whole[:end])
        assert "ifconfig" in fact.unknown
        assert not any("has no IPv4" in text for text in plan_network_warnings(fact))


def plan_network_warnings(fact: NodeFacts) -> tuple[str, ...]:
    facts = [fact, MACS.fact(1), MACS.fact(2)]
    return plan_network(config(MACS), facts, topology(facts)).warnings


def test_a_table_of_rdma_addresses_that_is_cut_off_says_nothing_about_the_rest() -> None:
    text = TRUE[0]["ibv_devinfo"]
    cut = text[: text.rindex("GID[  1]")]
    device = with_answer(ibv_devinfo=cut).rdma_devices[-1]
    assert (device.name, device.port_state, device.ipv4_gid) == ("rdma_en5", "PORT_ACTIVE", None)
    assert with_answer().rdma_devices[-1].ipv4_gid is True
