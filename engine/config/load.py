"""Makes a FlightConfig from a flightdeck.toml, or says everything that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from engine.config.cluster_tables import read_cluster, read_nodes
from engine.config.cross import cross_check
from engine.config.documents import DocumentError, file_text, read_toml
from engine.config.faults import Faults, Place
from engine.config.job_table import read_job
from engine.config.models import FlightConfig, PreflightConfig, RecoveryConfig, UiConfig
from engine.errors import ConfigError

_TABLES = ("cluster", "node", "job", "preflight", "recovery", "ui")
_LATER = "nothing here: this comes with a later release"
_LATER_TABLES = {"checkpoint": _LATER, "nodes": "[[node]], one table per rank"}
_LATER_KEYS = {
    "sync_script": _LATER,
    "consistency_threshold": _LATER,
    "exclude_divergent": _LATER,
    "max_restarts": _LATER,
    "min_nodes": _LATER,
}

Section = TypeVar("Section", bound=BaseModel)


def load_config(path: Path) -> FlightConfig:
    """Read `path`. Nothing is contacted, started or written. Raises ConfigError with all the faults, nothing else."""
    try:
        document = read_toml(path)
    except DocumentError as error:
        raise ConfigError([error.fault]) from error
    file = path.absolute()
    faults, name = Faults(), file_text(path)
    faults.unknown(Place(name), document, _TABLES, _LATER_TABLES)
    cluster_table, job_table = _table(faults, name, document, "cluster"), _table(faults, name, document, "job")
    cluster = read_cluster(faults, Place(name, "cluster"), cluster_table)
    nodes = read_nodes(faults, name, document.get("node"), file.parent)
    job = read_job(faults, Place(name, "job"), job_table, file.parent)
    preflight = _section(faults, name, document, "preflight", PreflightConfig)
    recovery = _section(faults, name, document, "recovery", RecoveryConfig)
    ui = _section(faults, name, document, "ui", UiConfig)
    cross_check(faults, name, document, cluster, job)
    good = tuple(node for node in nodes if node is not None)
    if faults.found or not (cluster and good and job.config and preflight and recovery and ui):
        raise ConfigError(faults.found)
    return FlightConfig(
        file=file, cluster=cluster, nodes=good, job=job.config, preflight=preflight, recovery=recovery, ui=ui
    )


def _table(faults: Faults, file: str, document: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name, {})
    if isinstance(found, dict):
        return found
    faults.add(Place(file), name, found, f"one table: [{name}] on a line of its own, its keys below")
    return {}


def _section(faults: Faults, file: str, document: Mapping[str, Any], name: str, kind: type[Section]) -> Section | None:
    table, place = _table(faults, file, document, name), Place(file, name)
    faults.unknown(place, table, kind.model_fields, _LATER_KEYS)
    return faults.validated(place, kind, table)
