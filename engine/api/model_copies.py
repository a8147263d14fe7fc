"""The models and data sets on the nodes."""

from __future__ import annotations

import asyncio
import posixpath

from engine.api.session import Session
from engine.cluster.copies import copies_of
from engine.cluster.probe_results import NodeCopies
from engine.config.models import Config, NodeConfig


class ModelsApi:
    def __init__(self, session: Session) -> None:
        self._session = session

    async def list(self, config: Config) -> list[NodeCopies]:
        """The copies on each host of the configuration, one entry for each, in its order; of a host that gave no answer
        the `problem`."""
        hosts = {node.ssh: node for node in config.nodes}
        return await asyncio.gather(*(self._of(node) for node in hosts.values()))

    async def _of(self, node: NodeConfig) -> NodeCopies:
        folders = [posixpath.dirname(node.model)] if node.model and node.model.startswith(("/", "~/")) else []
        return await copies_of(self._session.fleet.agent(node), folders=folders)
