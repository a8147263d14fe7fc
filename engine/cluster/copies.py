"""The models and data sets that nodes have."""

from __future__ import annotations

import json
from collections.abc import Iterable

from engine.cluster.agent_client import AgentClient
from engine.cluster.probe_results import NodeCopies
from engine.errors import FlightDeckError
from engine.models import NoValue
from engine.protocol.manifest import HubName

_LIMIT_S = 60.0


async def copies_of(agent: AgentClient, wanted: Iterable[HubName] = (), folders: Iterable[str] = ()) -> NodeCopies:
    """All copies of the agent's node, also in `folders`, or those that are `wanted`. An error is its `problem`."""
    request, name = json.dumps({"names": [*wanted], "folders": [*folders]}), agent.node.name
    try:
        report = await agent.probe("copies", request, result_type=NodeCopies, timeout_s=_LIMIT_S)
    except FlightDeckError as error:
        return NodeCopies(node=name, problem=str(error))
    if isinstance(report, NoValue):
        return NodeCopies(node=name, problem=str(report))
    return report.model_copy(update={"node": name})
