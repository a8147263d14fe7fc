"""Who is cabled to whom over Thunderbolt, worked out over all nodes."""

from __future__ import annotations

from collections.abc import Sequence

from engine.models import NodeFacts, Topology


def topology(facts: Sequence[NodeFacts]) -> Topology:
    """The cables between these nodes, in the configuration's order."""
    machines = {fact.host: fact.node for fact in reversed(facts)}
    names = tuple(fact.node for fact in facts if machines[fact.host] == fact.node)
    return Topology(nodes=names, shape="single" if len(names) == 1 else "none")
