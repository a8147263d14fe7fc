"""Python environments on the nodes: planned, made, listed, removed, and written into the configuration."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from pathlib import Path

from engine.api.nodes import NodesApi
from engine.api.runs import RunsApi
from engine.api.session import Session, named_nodes, stream
from engine.cluster.agent_client import THIS_MACHINE
from engine.cluster.copies import hosts_among
from engine.cluster.environments import (
    FOLDER,
    EnvironmentPlan,
    NodePythons,
    choose_minor,
    inspect_node,
    make_environment,
    plan_environment,
    remove_environment,
)
from engine.cluster.staging import gather_all
from engine.cluster.transfer import Spread, read_manifest
from engine.cluster.wheels import fetch_wheels, given_requirements, installed_here, wheels_name
from engine.config.edit import write_pythons
from engine.config.load import load_config
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, InputError, StateError, size_text
from engine.security.audit import audit_log
from engine.security.redact import redact
from engine.security.sanitise import plain
from engine.snapshots import CopyProgress


class EnvironmentsApi:
    def __init__(self, session: Session, nodes: NodesApi, runs: RunsApi) -> None:
        self._session, self._nodes, self._runs = session, nodes, runs

    async def plan(
        self, config: Config, names: Collection[str] = (), *, offline: bool = False
    ) -> list[EnvironmentPlan]:
        """One for each host of these nodes, by default of all; nothing is changed. `offline`: wheels are sent also
        where an index is reached. Raises InputError, ConfigError."""
        hosts, given = self._hosts(config, names), given_requirements(config)
        packages = config.job.kind.packages(config.job.words)
        if given is None and "mlx" not in packages:
            todo = 'write [environment] requirements = ["torch", "accelerate"], or name a requirements file'
            raise InputError("the packages of a PyTorch job's environment are not known", todo=todo)
        # Of all hosts, so that one made alone is as it would be among the others.
        pythons = await self._inspect(self._hosts(config))
        others = self._minor_of_others(config, hosts)
        minor = config.environment.python or others or choose_minor(pythons.values())
        wanted = installed_here if given is None else lambda _: given
        plans = [plan_environment(node, pythons[node.ssh], minor, wanted) for node in hosts]
        sends = offline or config.environment.wheels is not None
        return [plan.model_copy(update={"online": plan.online and not sends}) for plan in plans]

    def make(self, config: Config, plans: Sequence[EnvironmentPlan]) -> AsyncGenerator[CopyProgress, None]:
        """Make what is planned, on all hosts at once; where that fails, the last progress has `failed`. Closing the
        iterator ends it on the nodes; what has been sent or loaded by then is used the next time."""
        fleet, downloads = self._session.fleet, dict[str, asyncio.Task[Path]]()

        async def work(report: Callable[[CopyProgress], None]) -> None:
            async def make_one(plan: EnvironmentPlan) -> None:
                def tell(text: str, *, failed: bool = False) -> None:
                    report(CopyProgress(plan.node, note=text, failed=failed))

                async def send_wheels(node: NodeConfig, folder: str) -> None:
                    if (key := wheels_name(plan)) not in downloads:
                        fetch = fetch_wheels(config, plan, self._session.home / "wheels", tell)
                        downloads[key] = asyncio.create_task(fetch)
                    manifest = await read_manifest(fleet, THIS_MACHINE, str(await downloads[key]))
                    await Spread(fleet, [manifest], {"folder": folder}, {}, report).run([node])

                outcome = "failed"
                try:
                    made = await make_environment(fleet, plan, send_wheels, tell)
                    outcome = "made"
                    tell(f"{plan.python}: {len(made.packages)} packages, {size_text(made.bytes)}")
                except (FlightDeckError, OSError, ValueError) as error:
                    tell(redact(plain(error, 500)), failed=True)
                finally:
                    audit_log("environment", outcome, {"node": plan.node, "id": plan.id}, home=self._session.home)

            await asyncio.gather(*map(make_one, plans))

        return stream(work, name="environments")

    def use(self, config: Config, plans: Sequence[EnvironmentPlan]) -> Config:
        """Write these environments' pythons into the configuration's file, to which a person has agreed; the
        configuration as it is then. Raises InputError, ConfigError, StateError."""
        changed = load_config(write_pythons(config, {plan.ssh: plan.python for plan in plans}), config.overrides)
        self._nodes.accept(changed.digest)
        return changed

    async def all(self, config: Config, names: Collection[str] = ()) -> dict[str, NodePythons]:
        """Node → the pythons and environments of its host, or why they are not known. Raises InputError."""
        hosts = self._hosts(config, names)
        answers = await self._inspect(hosts)
        return {node.name: answers[node.ssh] for node in hosts}

    @staticmethod
    def _hosts(config: Config, names: Collection[str] = ()) -> list[NodeConfig]:
        """The first of these nodes, or of all, on each host. Raises InputError."""
        return list(hosts_among(named_nodes(config, names)).values())

    async def _inspect(self, hosts: Sequence[NodeConfig]) -> dict[str, NodePythons]:
        answers = await asyncio.gather(*(inspect_node(self._session.fleet, node) for node in hosts))
        return dict(zip((node.ssh for node in hosts), answers, strict=True))

    async def remove(self, config: Config, name: str, names: Collection[str] = ()) -> None:
        """The environment of this id, from these nodes or all. Raises InputError where the configuration or a run that
        has not ended uses it, LaunchError, NodeUnreachable, OSError."""
        if re.fullmatch(r"[0-9a-f]{16}", name) is None:
            raise InputError(f"{name[:80]!r} is no environment", todo="`flightdeck environments` lists them")
        configs = {f"{config.file or 'this configuration'} names it": config, **self._runs.configs_in_use()}
        part = f"/{FOLDER}/{name}/"
        if why := [user for user, used in configs.items() if any(part in node.python for node in used.nodes)]:
            raise InputError(f"environment {name} is not removed", why=", ".join(why))
        hosts = self._hosts(config, names)
        audit_log(
            "environment", "removed", {"id": name, "nodes": [node.name for node in hosts]}, home=self._session.home
        )
        await gather_all(remove_environment(self._session.fleet, node, name) for node in hosts)

    def _minor_of_others(self, config: Config, hosts: Sequence[NodeConfig]) -> str | None:
        """The Python of a node that keeps its own, as it was last seen."""
        made = {node.ssh for node in hosts}
        with contextlib.suppress(StateError):
            kept = (facts.python for facts in self._nodes.last_facts(config) if facts.host not in made)
            return next((".".join(python.split(".")[:2]) for python in kept if python), None)
        return None
