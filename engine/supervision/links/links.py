"""All links of one attempt: one per host, and always one to this machine, where the launcher runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.launch.staging import Ways
from engine.runs.plan_file import Plan
from engine.supervision.attempt import Attempt
from engine.supervision.links.agent_link import AgentLink
from engine.supervision.links.base import NodeLink
from engine.supervision.links.local import LocalLink
from engine.worker.wire import Identity, NodeFiles


class Links:
    """By rank, or all."""

    def __init__(self, links: Sequence[NodeLink]) -> None:
        self._all = tuple(links)
        self._of_rank = {rank: link for link in links for rank in link.ranks}

    def __iter__(self) -> Iterator[NodeLink]:
        return iter(self._all)

    def to(self, rank: int) -> NodeLink:
        return self._of_rank[rank]

    def start(self) -> None:
        """On the running loop."""
        for link in self._all:
            link.start()

    async def close(self) -> None:
        # All at once: each may wait for a host that does not answer any more.
        await asyncio.gather(*(link.close() for link in self._all))


def links_to(plan: Plan, attempt: Attempt, fleet: Ways, here: Path, known: Mapping[int, Identity]) -> Links:
    """The links of an attempt, not started yet. `here` is this machine's own node root, for an attempt that has no rank
    on it; `known` are the identities that an earlier supervisor has entered."""
    links: list[NodeLink] = []
    for place in attempt.places:
        names = [plan.ranks[rank].node for rank in place.ranks]
        files = attempt.files_at(place, plan.run_id)
        node = plan.config.nodes[place.ranks[0]]
        if node.local:
            links.append(LocalLink(files, attempt.nonce, place.ranks, names, known=known))
        else:
            links.append(AgentLink(place, files, attempt.nonce, fleet.to(node), names=names, known=known))
    if not any(link.local for link in links):
        links.append(LocalLink(NodeFiles.of(here, plan.run_id, attempt.number), attempt.nonce))
    return Links(links)
