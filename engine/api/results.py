"""The results of runs: what each has left, its copy on this machine, and its publication."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path

from engine.api.runs import RunsApi
from engine.api.session import Session, stream
from engine.cluster.file_copy import FileCopy
from engine.config.models import NodeConfig
from engine.errors import InputError, StateError
from engine.models import RunRecord
from engine.node.probes import nearest
from engine.protocol.attempt import sync_folder
from engine.protocol.sizes import room_fault
from engine.publish.model_card import PublicationRequest, TrainedRun
from engine.publish.model_folder import ADAPTERS, ModelFolder, read_folder
from engine.publish.targets import Publication, check_target, write_target
from engine.run.run_plan import read_plan
from engine.run.watch import RunWatch
from engine.security.audit import audit_log
from engine.security.paths import validate_path
from engine.snapshots import Fetched, FetchProgress, ResultFile, RunResult
from engine.task_result import Evaluated, Fused

PATIENCE_S = 120.0
_REPORT_S, _RATE_AFTER_S, _RATE_OVER_S = 0.25, 2.0, 10.0
_WANTED = {
    "trained": (("adapter", "weights", "model"), False, "no weights were saved so far"),
    "best": (
        ("adapter", "weights", "model"),
        True,
        "no best weights were saved: that takes save_best = true in [job]",
    ),
    "weights": (("model", "weights"), False, "no full weights were saved: the run trains an adapter"),
    "checkpoint": (("checkpoint",), False, "no checkpoint has been saved whole"),
    "fused": (("model",), False, "no fusion has left a model: flightdeck fuse makes one"),
}


class ResultsApi:
    def __init__(self, session: Session, runs: RunsApi) -> None:
        self._session = session
        self._runs = runs

    def result(self, run: str) -> RunResult:
        """That of a run that goes on is what it has left so far. Raises RunNotFound, StateError."""
        watch = RunWatch(self._runs.find(run))
        watch.poll()
        return watch.result()

    def fetch(
        self, run: str, folder: Path | None = None, wanted: str = "trained", *, patience_s: float = PATIENCE_S
    ) -> AsyncGenerator[FetchProgress | Fetched, None]:
        """Copy what is `wanted` ("trained", "best", "weights", "checkpoint" or "fused") of a run to `folder`, else to
        ./<run id> (./<run id>-fused), from all nodes that have some of it at once: progress, and at last what is there.
        Closing the iterator ends it; what has come by then is not sent again the next time. Raises RunNotFound,
        InputError before anything was written, NodeUnreachable, LaunchError, FileDiffers, StateError."""

        async def work(report: Callable[[FetchProgress | Fetched], None]) -> None:
            directory = await asyncio.to_thread(self._runs.find_trained, run)
            files = await asyncio.to_thread(self._chosen, directory.id, wanted)
            target = (folder or Path(directory.id + "-fused" * (wanted == "fused"))).expanduser().absolute()
            missing = await asyncio.to_thread(_missing, files, target)
            total, kept = sum(file.bytes for file in files), sum(_kept(*item) for item in missing.items())
            here = total - sum(file.bytes for file in missing.values()) + kept
            progress, agent = _Progress(total, here, report), self._session.fleet.agent

            async def copy(node: NodeConfig) -> None:
                for path, file in missing.items():
                    if file.node == node.name:
                        part = _part_path(path, file)
                        part.parent.mkdir(parents=True, exist_ok=True)
                        await FileCopy(agent(node), file, part, patience_s, progress.add, progress.report).run()

            names, nodes = {file.node for file in missing.values()}, read_plan(directory.plan).config.nodes
            sources = [node for node in nodes if node.name in names]
            # One that is away from the start is not waited for.
            await asyncio.gather(*(agent(node).session() for node in sources))
            try:
                ends = await asyncio.gather(*map(copy, sources), return_exceptions=True)
                if failure := next((end for end in ends if end is not None), None):
                    raise failure
                for path, file in missing.items():
                    os.replace(_part_path(path, file), path)
                    sync_folder(path.parent)
            except OSError as error:
                raise StateError("it cannot be written", where=str(target), why=error) from error
            report(Fetched(target, tuple(files)))

        return stream(work, name="fetch")

    def to_publish(
        self, run: str, target: str, *, fused: bool = False, repository: str | None = None
    ) -> tuple[str, Path | None]:
        """Name what `fetch` is to bring for a target: "fused" where asked for, or where it is there and the target is
        not the Hub or nothing else is; with its folder where it lies on this machine. Raises RunNotFound, StateError;
        InputError where there is nothing, or the target, or the `repository` of the Hub, cannot take it."""
        if repository is not None:
            from engine.publish.hub import check_repository

            check_repository(repository)
        directory = self._runs.find_trained(run)
        models, result = self._runs.fused(directory.id), self.result(directory.id)
        trained = any(map(result.newest, _WANTED["trained"][0]))
        if fused or (models and (target != "hub" or not trained)):
            model, nodes = self._chosen(directory.id, "fused")[0], read_plan(directory.plan).config.nodes
            folder, here = Path(model.path).parent, any(node.local for node in nodes if node.name == model.node)
            return "fused", folder if here and folder.is_dir() else None
        wanted = "weights" if result.newest("model") else "trained"
        files = self._chosen(directory.id, wanted)
        if files[0].holds != "model" and target != "hub":
            library = next((ADAPTERS[file.name] for file in files if file.name in ADAPTERS), "")
            check_target(target, ModelFolder(Path(directory.id), files[0].holds, library, {}, (), ()), directory.id)
        return wanted, None

    def _chosen(self, run: str, wanted: str) -> Sequence[ResultFile]:
        """The files, each of another name. Raises InputError."""
        kinds, best, why = _WANTED[wanted]
        result = RunResult(self._runs.fused(run)) if wanted == "fused" else self.result(run)
        files = next((files for kind in kinds if (files := result.newest(kind, best=best))), ())
        if not files:
            todo, usable = "", wanted == "trained" and result.newest("checkpoint")
            if usable and self._runs.fused(run):
                todo = f"`flightdeck fetch {run} --fused` brings the model that was fused of a checkpoint"
            elif usable:
                todo = f"`flightdeck fuse {run}` makes a model of its newest checkpoint"
            raise InputError("there is nothing to fetch", where=run, why=why, todo=todo)
        return list({file.name: file for file in files}.values())

    def _measured(self, run: RunRecord, weights: ModelFolder, path: str | None) -> Iterator[Evaluated | Fused]:
        """The findings of tasks, since the end of the run, on these weights, at `path` of a node; newest first."""
        paths = (path, str(Path(path).parent)) if path is not None else ()
        for task in self._runs.tasks_of(run.id):
            watch, asked = self._runs.watch(task.id), read_plan(self._runs.find(task.id).plan).config.job.task
            results = [result for result in watch.poll().task_results if isinstance(result, Evaluated | Fused)]
            fused = any(file.sha256 in weights.hashes.values() for file in watch.result().files)
            late = task.created_at >= (run.ended_at or run.created_at)
            if late and (fused or (asked is not None and asked.weights in paths)):
                yield from (one for one in results if fused or getattr(one, "variant", "fused") != "fused")

    def publish(self, request: PublicationRequest) -> Publication:
        """Blocking. Raises RunNotFound, StateError, OSError; InputError while the run goes on, and where the target
        cannot load the weights; FlightDeckError for an upload that broke off."""
        directory, weights = self._runs.find_trained(request.run), read_folder(request.folder)
        snapshot, config = RunWatch(directory).poll(), read_plan(directory.plan).config
        if snapshot.result is None:
            raise InputError("the run goes on", where=directory.id, todo="publish it when it has ended")
        if config.job.kind.own_model is not None:
            raise InputError("nothing is known of what it trained", where=directory.id, why=config.job.kind.own_model)
        names, facts = {node.name for node in config.nodes}, self._session.store.last_facts(config.cluster.name)
        chips = sorted({fact.chip for fact in facts if fact.chip and fact.node in names})
        run = TrainedRun(snapshot.record, snapshot.result, config, chips, request, self._measured)
        if request.target == "hub":
            from engine.publish.hub import upload

            publication = Publication(url=upload(run, weights))
        else:
            publication = write_target(run, weights)
        context = {"run": directory.id, "target": request.target, "place": publication.url or publication.folder}
        audit_log("publish", "done", context, home=self._session.home)
        return publication


class _Progress:
    """Reports what has come, not too often, with the rate of the last _RATE_OVER_S: none until _RATE_AFTER_S after the
    first bytes, which come late or all at once."""

    def __init__(self, total: int, here: int, report: Callable[[FetchProgress], None]) -> None:
        self._total, self._here, self._report = total, here, report
        self._samples = deque[tuple[float, int]](maxlen=int(_RATE_OVER_S / _REPORT_S))
        self.report()

    def add(self, count: int) -> None:
        self._here += count
        now = time.monotonic()
        if not self._samples or now - self._samples[-1][0] >= _REPORT_S or self._here == self._total:
            self._samples.append((now, self._here))
            self.report()

    def report(self, note: str = "") -> None:
        rate = None
        if self._samples and not note:
            (began, before), (now, here) = self._samples[0], self._samples[-1]
            rate = (here - before) / (now - began) if now - began >= _RATE_AFTER_S else None
        self._report(FetchProgress(self._here, self._total, rate, note))


def _missing(files: Sequence[ResultFile], target: Path) -> dict[Path, ResultFile]:
    """The files that are not there yet, by their paths below `target`. Raises InputError where there is no room, or
    other files of these names."""
    paths = {validate_path(target / file.name, "the file", roots=[target]): file for file in files}
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file", todo="name a folder")
    missing = {path: file for path, file in paths.items() if not (path.is_file() and _is_same(path, file))}
    if other := next(filter(os.path.lexists, missing), None):
        why = f"{other} is there, and another file"
        raise InputError(f"{target} is not used", why=why, todo="name another folder, or move it away")
    need = sum(file.bytes - _kept(path, file) for path, file in missing.items())
    if fault := room_fault(need, shutil.disk_usage(nearest(target)).free):
        raise InputError(f"{target} has no room", why=fault)
    return missing


def _part_path(path: Path, file: ResultFile) -> Path:
    """Only what was to become the same content is continued."""
    return path.with_name(f"{path.name}.{file.sha256[:12]}.part")


def _kept(path: Path, file: ResultFile) -> int:
    """Bytes that an earlier fetch has left of it."""
    part = _part_path(path, file)
    size = part.stat().st_size if part.is_file() else 0
    return size if size <= file.bytes else 0


def _is_same(path: Path, file: ResultFile) -> bool:
    with path.open("rb") as content:
        return path.stat().st_size == file.bytes and hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
