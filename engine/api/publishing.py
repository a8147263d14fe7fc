"""Publishing of what a run has trained: on the Hugging Face Hub, or as a folder for LM Studio, Ollama or llama.cpp."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine.api.runs import RunsApi
from engine.api.session import Session
from engine.errors import InputError, StateError
from engine.publish.hub import upload
from engine.publish.model_card import PublicationRequest, TrainedRun
from engine.publish.model_folder import read_folder
from engine.publish.targets import LM_STUDIO, Publication, check_target, write_target
from engine.run.run_plan import read_plan
from engine.security.audit import audit_log


class PublishingApi:
    def __init__(self, session: Session, runs: RunsApi) -> None:
        self._session = session
        self._runs = runs

    def publish(self, request: PublicationRequest) -> Publication:
        """Blocking. Raises RunNotFound, StateError, OSError; InputError while the run goes on, and where the target
        cannot load the weights; FlightDeckError for an upload that broke off."""
        run, weights, place = self._trained(request), read_folder(request.folder), request.place
        if request.target == "hub":
            publication = Publication("hub", url=upload(run, weights, place or ""))
        else:
            check_target(request.target, weights, run.record.id)
            default = LM_STUDIO.expanduser() if request.target == "lmstudio" else Path()
            if place is None and not default.is_dir():
                raise InputError("LM Studio's models were not found", where=str(LM_STUDIO), todo="give their folder")
            publication = write_target(request.target, weights, run, Path(place).expanduser() if place else default)
        context = {"run": run.record.id, "target": request.target, "place": publication.url or publication.folder}
        audit_log("publish", "done", context, home=self._session.home)
        return publication

    def _trained(self, request: PublicationRequest) -> TrainedRun:
        directory, chips = self._runs.find(request.run), set[str]()
        snapshot, config = self._runs.watch(directory.id).poll(), read_plan(directory.plan).config
        if snapshot.result is None:
            raise InputError("the run goes on", where=directory.id, todo="publish it when it has ended")
        if config.job.kind.own_model is not None:
            raise InputError("nothing is known of what it trained", where=directory.id, why=config.job.kind.own_model)
        with contextlib.suppress(StateError):
            names, facts = {node.name for node in config.nodes}, self._session.store.last_facts(config.cluster.name)
            chips = {fact.chip for fact in facts if fact.chip and fact.node in names}
        return TrainedRun(snapshot.record, snapshot.result, config, sorted(chips), request)
