"""Python environments on the nodes: planned, made, listed, removed, and written into the configuration."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from pathlib import Path

from pydantic import ValidationError

from engine.api.nodes import NodesApi
from engine.api.runs import RunsApi
from engine.api.session import Session, stream
from engine.cluster.environments import (
    EnvironmentPlan,
    EnvironmentProgress,
    EnvironmentsReport,
    choose_minor,
    compare_with_node,
    inspect_node,
    list_environments,
    make_environment,
    plan_environment,
)
from engine.cluster.wheels import WheelCache, given_requirements, installed_here
from engine.config.formats import resolved
from engine.config.load import load_config
from engine.config.models import Config, NodeConfig
from engine.config.node_pythons import write_pythons
from engine.errors import FlightDeckError, InputError, StateError
from engine.node.probes.environment import FOLDER
from engine.run.run_plan import read_plan
from engine.security.audit import audit_log
from engine.security.redact import redact
from engine.security.sanitise import plain


class EnvironmentsApi:
    def __init__(self, session: Session, nodes: NodesApi, runs: RunsApi) -> None:
        self._session, self._nodes, self._runs = session, nodes, runs

    async def plan(
        self, config: Config, names: Collection[str] = (), *, offline: bool = False
    ) -> list[EnvironmentPlan]:
        """One for each host of these nodes, by default of all; nothing is changed. `offline`: wheels are sent whether
        or not a node reaches an index. Raises InputError, ConfigError."""
        hosts, fleet = _hosts(config, names), self._session.fleet
        given = given_requirements(config.environment, config.folder)
        packages = config.job.kind.packages(config.job.words)
        if given is None and "mlx" not in packages:
            todo = 'write [environment] requirements = ["torch", "accelerate"], or name a requirements file'
            raise InputError("the packages of a PyTorch job's environment are not known", todo=todo)
        seen = await asyncio.gather(*(inspect_node(fleet.to(node)) for node in hosts))
        minor = choose_minor(seen, config.environment.python or self._minor_of_others(config, hosts))
        wanted = installed_here if given is None else lambda _: given
        plans = [plan_environment(node, pythons, minor, wanted) for node, pythons in zip(hosts, seen, strict=True)]
        offline = offline or config.environment.wheels is not None
        compared = (compare_with_node(fleet, plan, one, offline=offline) for plan, one in zip(plans, seen, strict=True))
        return list(await asyncio.gather(*compared))

    def make(self, config: Config, plans: Sequence[EnvironmentPlan]) -> AsyncGenerator[EnvironmentProgress, None]:
        """Make what is planned, on all hosts at once; each host's last progress is `ended`, or `failed`. Closing the
        iterator ends it on the nodes; what has been sent or loaded by then is used the next time."""
        source = config.environment.wheels
        folder = Path(resolved(source, config.folder)) if source is not None else None
        cache = WheelCache(self._session.home / "wheels", folder, pinned=config.environment.requirements is None)

        async def work(report: Callable[[EnvironmentProgress], None]) -> None:
            async def make_one(plan: EnvironmentPlan) -> None:
                def tell(text: str, **how: bool) -> None:
                    report(EnvironmentProgress(node=plan.node, text=text, **how))

                details, outcome = {"node": plan.node, "ssh": plan.ssh, "id": plan.id}, "failed"
                try:
                    if plan.problem:
                        raise InputError(plan.problem, todo=plan.todo)
                    made = await make_environment(self._session.fleet, plan, cache, tell)
                    outcome = "made"
                    tell(f"{plan.python}: {len(made.packages)} packages, {made.bytes / 1e6:,.0f} MB", ended=True)
                except (FlightDeckError, OSError, ValidationError) as error:
                    tell(redact(plain(error, 500)), failed=True)
                finally:
                    audit_log("environment", outcome, details, home=self._session.home)

            await asyncio.gather(*map(make_one, plans))

        return stream(work, name="environments")

    def use(self, config: Config, plans: Sequence[EnvironmentPlan]) -> Config:
        """Write these environments' pythons into the configuration's file, which a person has agreed to; the
        configuration as it is then. Raises InputError, ConfigError, StateError."""
        write_pythons(config, {plan.ssh: plan.python for plan in plans})
        assert config.file is not None
        changed = load_config(config.file, config.overrides)
        self._nodes.accept(changed.digest)
        return changed

    async def all(
        self, config: Config, names: Collection[str] = (), *, remove: str = ""
    ) -> dict[str, EnvironmentsReport | str]:
        """Node → what there is on its host, or why that is not known. With `remove`, the environment of this id is
        removed first; raises InputError where the configuration or a run that has not ended uses it."""
        if remove and (users := self._users(config, remove)):
            raise InputError(f"environment {remove} is not removed", why=f"used by {', '.join(users)}")

        async def ask(node: NodeConfig) -> EnvironmentsReport | str:
            pythons = (await inspect_node(self._session.fleet.to(node))).pythons
            asked = node.model_copy(update={"python": pythons[0].path}) if pythons else node
            try:
                return await list_environments(self._session.fleet, asked, remove=remove)
            except (FlightDeckError, OSError) as error:
                return plain(error, 300)

        hosts = _hosts(config, names)
        answers = await asyncio.gather(*map(ask, hosts))
        if remove:
            removed = [
                node.name
                for node, one in zip(hosts, answers, strict=True)
                if not isinstance(one, str) and not one.problem
            ]
            audit_log("environment", "removed", {"id": remove, "nodes": removed}, home=self._session.home)
        return {node.name: answer for node, answer in zip(hosts, answers, strict=True)}

    def _users(self, config: Config, name: str) -> list[str]:
        """The configurations of which a node's python is in this environment."""
        configs = {str(config.file or "this configuration"): config}
        for record in self._runs.all():
            if not record.state.ended:
                with contextlib.suppress(StateError):
                    configs[f"run {record.id}"] = read_plan(self._runs.directory(record.id).plan).config
        part = f"/{FOLDER}/{name}/"
        return [user for user, used in configs.items() if any(part in node.python for node in used.nodes)]

    def _minor_of_others(self, config: Config, hosts: Sequence[NodeConfig]) -> str | None:
        """The Python of a node that keeps its own, as it was last seen."""
        made = {node.ssh for node in hosts}
        with contextlib.suppress(StateError):
            kept = (facts.python for facts in self._nodes.last_facts(config) if facts.host not in made)
            return next((".".join(python.split(".")[:2]) for python in kept if python), None)
        return None


def _hosts(config: Config, names: Collection[str]) -> list[NodeConfig]:
    """The first node of each host that one of these nodes is on; all without names. Raises InputError."""
    if unknown := sorted(set(names) - {node.name for node in config.nodes}):
        raise InputError(f"no node {unknown[0]!r}", todo=f"nodes: {', '.join(node.name for node in config.nodes)}")
    return list({node.ssh: node for node in reversed(config.nodes) if not names or node.name in names}.values())[::-1]
