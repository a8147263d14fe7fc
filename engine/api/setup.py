"""Set-up: from an empty folder to a flightdeck.toml, in steps that can be left and taken up again later."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import tomllib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import Field

from engine.api.checks import ChecksApi
from engine.api.launches import LaunchesApi
from engine.api.model_copies import ModelsApi
from engine.api.nodes import NodesApi
from engine.api.session import Session, stream
from engine.checks.dataset import DataInspection
from engine.checks.placement import hub_names
from engine.cluster.discovery import FoundHost, FoundPython, draft_nodes, find_python, hosts_from_names
from engine.cluster.transport.ssh_config import OWN_KNOWN_HOSTS
from engine.config.documents import in_form_of, read_text
from engine.config.draft import draft, find_job, find_yaml, is_beside, split_subset, write_draft
from engine.config.load import load_config
from engine.config.models import Config, FineTuneType
from engine.config.redraft import redraft
from engine.errors import InputError, size_text, spans
from engine.models import FrozenModel
from engine.node.source_files import OF_ROWS, suffix_of
from engine.plan.capacity import Capacity
from engine.protocol.attempt import read_regular, write_atomic
from engine.protocol.manifest import DATA_PREFIX, PUSHED
from engine.security.identifiers import SshTarget
from engine.security.paths import make_home

_AT_ONCE: Final = 16
"""Hosts asked at the same time: a home's ssh_config may name hundreds."""
_COPY_ID: Final = """
for key in ~/.ssh/id_*.pub; do [ -f "$key" ] && exec ssh-copy-id "$@"; done
ssh-keygen -t ed25519 -f ~/.ssh/id_ed25519 && exec ssh-copy-id "$@"
"""
_MOST_DATA: Final = 20
_JOB_KEYS: Final = ("model", "data", "fine_tune_type", "batch_size", "batch_tokens", "iters", "epochs")


class SetupChoices(FrozenModel):
    """Choices so far; None where the file, or a default, counts."""

    step: int = 0
    """The one at which it was left."""
    typed: tuple[str, ...] = ()
    """Hosts that were named by a person."""
    chosen: tuple[str, ...] | None = None
    """`[user@]host[:port]` of the nodes, in rank order."""
    own_program: bool = False
    """The job is a command, which has its own model, data and method."""
    model: str | None = None
    data: str | None = None
    """May be followed by its subset: see split_subset."""
    fine_tune_type: FineTuneType | None = None
    batch_size: int | None = Field(default=None, ge=1)
    batch_tokens: int | None = Field(default=None, ge=1)
    """In place of batch_size, as the file has it; epochs are in place of iters."""
    iters: int | None = Field(default=None, ge=1)
    epochs: float | None = Field(default=None, gt=0)
    processes: dict[str, int] = Field(default_factory=dict)
    """Host → the ranks that the file has there, where they are several."""

    def ranks(self, hosts: Iterable[str]) -> int:
        return sum(self.processes.get(host, 1) for host in hosts)

    @property
    def settings(self) -> dict[str, object]:
        """Keys of [job]."""
        return {key: value for key in _JOB_KEYS if (value := getattr(self, key)) is not None}


@dataclass(frozen=True)
class NodeCandidate:
    """A host that could be a node, and what it answers; None until then."""

    host: FoundHost
    answer: FoundPython | None = None

    @property
    def usual(self) -> bool:
        """Taken without being asked for: Macs, also those that announce ssh and do not let us in yet, and other
        machines, but for this one, where MLX is there."""
        answer, announced = self.answer, "Bonjour" in self.host.sources
        if answer is None or not answer.answers:
            return False
        return answer.mac or (answer.python is not None and not self.host.here) or (announced and not answer.machine)

    def with_python(self, python: str) -> NodeCandidate:
        """With that of an environment that was made there."""
        return replace(self, answer=(self.answer or FoundPython()).made(python))


class SetupApi:
    def __init__(
        self, session: Session, nodes: NodesApi, checks: ChecksApi, launches: LaunchesApi, models: ModelsApi
    ) -> None:
        self._session, self._nodes, self._checks = session, nodes, checks
        self._launches, self._models = launches, models

    def read(self, target: Path) -> SetupChoices:
        """Those for this file that are not written yet, else the file's own, as far as it can be read."""
        with contextlib.suppress(OSError, ValueError):
            return SetupChoices.model_validate_json(read_regular(self._kept(target)))
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            document = tomllib.loads(target.read_text(encoding="utf-8-sig")) if target.exists() else {}
            nodes = tuple(str(node.get("ssh", "127.0.0.1")) for node in document.get("node", ()))
            job = document.get("job") or find_yaml(target.absolute().parent)[1]
            program = {"own_program": "command" in job or "script" in job}
            keys = {key: job[key] for key in _JOB_KEYS if key in job}
            if (subset := document.get("data", {}).get("subset")) and "data" in keys:
                keys["data"] = f"{keys['data']} {subset}"
            several = {
                host: node["processes"]
                for host, node in zip(nodes, document.get("node", ()), strict=True)
                if "processes" in node
            }
            file = {"typed": nodes, "chosen": nodes or None, "processes": several}
            return SetupChoices.model_validate({**file, **program, **keys})
        return SetupChoices()

    def keep(self, target: Path, choices: SetupChoices) -> None:
        """Until the file is written. Raises StateError, OSError."""
        make_home(self._session.home)
        write_atomic(self._kept(target), choices.model_dump_json())

    def _kept(self, target: Path) -> Path:
        digest = hashlib.sha256(str(target.absolute()).encode(errors="surrogateescape")).hexdigest()[:16]
        return self._session.home / f"setup-{digest}.json"

    def candidates(self, typed: Sequence[str] = (), *, others: bool = True) -> AsyncGenerator[NodeCandidate, None]:
        """Hosts that could be nodes, those that are typed first and with `others` those that can be found: each when it
        is found, and again with its answer. Closing the iterator ends the search. Raises InputError for a typed text
        that is no host."""
        named, limit, seen = hosts_from_names(typed), asyncio.Semaphore(_AT_ONCE), set[str]()

        async def work(report: Callable[[NodeCandidate], None]) -> None:
            async def ask(host: FoundHost) -> None:
                async with limit:
                    report(NodeCandidate(host, await self.ask(host.ssh)))

            async with asyncio.TaskGroup() as asking:
                for waits in (None, False, True)[: 1 + 2 * others]:
                    hosts = named if waits is None else await self._nodes.discover(bonjour=waits)
                    for host in hosts:
                        if host.ssh not in seen:
                            seen.add(host.ssh)
                            report(NodeCandidate(host))
                            asking.create_task(ask(host))

        return stream(work, name="setup")

    async def ask(self, host: str) -> FoundPython:
        """The python of `[user@]host[:port]`, or why there is none. Raises InputError for what is no host."""
        return await find_python(self._session.fleet.reach(host))

    def copy_id_argv(self, host: str) -> list[str]:
        """The program that puts a login key of this machine on a host, and makes one where there is none; it asks for
        the password there. Raises InputError for what is no host."""
        target = SshTarget.parse(host)
        files = f'"{self._session.home / OWN_KNOWN_HOSTS}" ~/.ssh/known_hosts'
        options = ["-o", f"UserKnownHostsFile={files}", "-o", "StrictHostKeyChecking=yes"]
        options += ["-p", str(target.port)] * (target.port is not None)
        where = f"{target.user}@{target.host}" if target.user else target.host
        return ["/bin/sh", "-c", _COPY_ID, "sh", *options, where]

    def text(self, target: Path, choices: SetupChoices, candidates: Sequence[NodeCandidate]) -> str:
        """The file's text, of the candidates as its nodes in rank order: a new one, or the one that is there with these
        nodes and the chosen keys. Raises InputError, ConfigError."""
        nodes = draft_nodes(
            [candidate.host for candidate in candidates],
            [candidate.answer or FoundPython(problem="not probed") for candidate in candidates],
        )
        folder, remote = target.absolute().parent, any(not candidate.host.here for candidate in candidates)
        push = remote and is_beside(choices.data, folder)
        if target.exists():
            changes = split_subset(choices.settings) | ({"data.push": True} if push else {})
            return redraft(read_text(target, "a flightdeck.toml"), nodes, changes)
        job = find_job(folder, remote=remote)
        push = job.push if choices.data is None else push
        return draft(nodes, cluster=folder.name, job=replace(job, settings=choices.settings, push=push))

    def config(self, target: Path, text: str) -> Config:
        """The configuration of a text that is not written yet. Raises ConfigError."""
        return load_config(target, text=text)

    def write(self, target: Path, text: str) -> Config:
        """Write the file, atomically, once its text is known to be sound; what it names was chosen here, and may run.
        Raises ConfigError, StateError."""
        config = self.config(target, text)
        self._nodes.accept(config.digest)
        write_draft(target.resolve(), in_form_of(target, text), force=True)
        with contextlib.suppress(OSError):
            self._kept(target).unlink()
        return config

    def data_found(self, target: Path) -> list[str]:
        """Training data beside the file: mlx-lm's folders, and files of rows."""
        folder = target.absolute().parent
        folders = [path.parent.name for path in sorted(folder.glob("*/train.jsonl"))]
        files = [path.name for path in sorted(folder.iterdir()) if suffix_of(path) in OF_ROWS and path.is_file()]
        return [*folders, *files][:_MOST_DATA]

    async def copies(self, config: Config, *, dataset: bool) -> dict[str, str]:
        """The models, or data sets, that the nodes have, the largest first: as [job] names one → its size and nodes.
        What was pushed may be another project's."""
        kind, sizes, holders = "dataset" if dataset else "model", dict[str, int](), dict[str, list[str]]()
        for node in await self._models.list(config):
            for copy in node.copies:
                if copy.kind == kind and copy.complete and not copy.name.startswith(PUSHED):
                    name = DATA_PREFIX * dataset + copy.name
                    sizes[name] = max(copy.bytes, sizes.get(name, 0))
                    holders.setdefault(name, []).append(node.node)
        return {
            name: f"{size_text(sizes[name])} on {spans(holders[name])}"
            for name in sorted(sizes, key=lambda name: -sizes[name])
        }

    async def inspect(self, config: Config, *, shown: int) -> DataInspection:
        """The job's data as its first node reads it, or where it is sent from here, as this machine does. Raises as
        ChecksApi.data."""
        if config.data.push:
            config = self._checks.data_config(str(config.folder / Path(config.job.data or "").expanduser()))
        return await self._checks.data(config, shown=shown)

    async def capacities(self, config: Config) -> dict[str, Capacity]:
        """The largest batch of a rank by method, on the nodes with the least room; of a model of the Hub also before a
        launch has brought it there. Raises InputError where the model cannot be read."""
        ask = functools.partial(self._launches.capacities, config, mac_bytes=None, longest=False, largest_batch=True)
        try:
            report = await ask(model=None)
        except InputError:
            if (hub := hub_names(config).get("model")) is None:
                raise
            report = await ask(model=hub.name)
        rows, least = report.largest_batch or [], dict[str, Capacity]()
        # Adapters of a quantized model are named with a q; beside those of another they are of another model.
        quantized = all(row.method != "lora" for row in rows)
        for row in rows:
            method = row.method.removeprefix("q") if quantized else row.method
            if method not in least or (row.amount is not None and row.amount < (least[method].amount or 0)):
                least[method] = row
        return least
