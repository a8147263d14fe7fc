"""Makes a FlightConfig from a flightdeck.toml, or says everything that is wrong with it at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from engine.config.cluster_tables import node_tables, read_cluster, read_defaults, read_nodes
from engine.config.cross import cross_check
from engine.config.documents import DocumentError, file_text, read_toml
from engine.config.faults import Faults, Place
from engine.config.hostfile_import import ImportedHosts, read_hostfile
from engine.config.job_table import PATH_KEYS, ReadJob, read_job
from engine.config.models import (
    CalibrationConfig,
    CheckpointConfig,
    ConsistencyConfig,
    FlightConfig,
    NodeConfig,
    PreflightConfig,
    RecoveryConfig,
    UiConfig,
)
from engine.config.places import host_form, on_node, path_form, remote_path_form, resolved
from engine.errors import ConfigError

_SECTIONS = ("preflight", "consistency", "calibration", "checkpoint", "recovery", "ui")
_TABLES = ("cluster", "node_defaults", "node", "job", *_SECTIONS)
_OTHERWISE = {"nodes": "[[node]], one table per rank"}
"""Tables that people write, and what is meant."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[\x21-\x7e]{1,1000}")

Section = TypeVar("Section", bound=BaseModel)


def load_config(path: Path) -> FlightConfig:
    """Read `path`. Nothing is contacted, started or written. Raises ConfigError with all the faults, nothing else."""
    try:
        document = read_toml(path)
    except DocumentError as error:
        raise ConfigError([error.fault]) from error
    file = path.absolute()
    faults, name = Faults(), file_text(path)
    faults.unknown(Place(name), document, _TABLES, _OTHERWISE)
    cluster_table, job_table = _table(faults, name, document, "cluster"), _table(faults, name, document, "job")
    cluster = read_cluster(faults, Place(name, "cluster"), cluster_table)
    defaults = read_defaults(faults, Place(name, "node_defaults"), _table(faults, name, document, "node_defaults"))
    imported = _imported(faults, name, cluster_table, file.parent)
    tables = imported.tables if imported else node_tables(faults, name, document.get("node"))
    if imported and document.get("node"):
        accepted = "nothing here: the nodes are those of [cluster] hostfile; leave out one of the two"
        faults.add(Place(name), "node", document["node"], accepted)
    if cluster is not None and imported and imported.backend and "backend" not in cluster_table:
        cluster = cluster.model_copy(update={"backend": imported.backend})
    nodes = read_nodes(faults, tables, defaults, file.parent)
    job = read_job(faults, Place(name, "job"), job_table, file.parent)
    preflight = _section(faults, name, document, "preflight", PreflightConfig)
    _check_preflight_paths(faults, Place(name, "preflight"), preflight)
    consistency = _section(faults, name, document, "consistency", ConsistencyConfig)
    calibration = _section(faults, name, document, "calibration", CalibrationConfig)
    checkpoint = _section(faults, name, document, "checkpoint", CheckpointConfig)
    _check_destination(faults, Place(name, "checkpoint"), checkpoint, nodes)
    recovery = _section(faults, name, document, "recovery", RecoveryConfig)
    if recovery is not None and recovery.min_nodes is not None and recovery.min_nodes > len(nodes) > 0:
        faults.add(Place(name, "recovery"), "min_nodes", recovery.min_nodes, f"at most {len(nodes)}, all the nodes")
    ui = _section(faults, name, document, "ui", UiConfig)
    cross_check(faults, name, tables, defaults=defaults, cluster=cluster, job=job)
    good = tuple(node for node in nodes if node is not None)
    _check_job_paths(faults, job, good)
    if faults.found or not (
        cluster and good and job.config and preflight and recovery and ui and consistency and calibration and checkpoint
    ):
        raise ConfigError(faults.found)
    config = job.config
    if imported and imported.env:
        config = config.model_copy(update={"env": {**imported.env, **config.env}})
    return FlightConfig(
        file=file,
        cluster=cluster,
        nodes=tuple(_with_job(node, config.model, config.data, file.parent) for node in good),
        job=config,
        preflight=preflight,
        consistency=consistency,
        calibration=calibration,
        checkpoint=checkpoint,
        recovery=recovery,
        ui=ui,
    )


def _imported(faults: Faults, name: str, cluster: Mapping[str, Any], base: Path) -> ImportedHosts | None:
    """What the hostfile that [cluster] names says; None where it names none."""
    named = cluster.get("hostfile")
    if not isinstance(named, str):
        return None
    if accepted := path_form(named):
        faults.add(Place(name, "cluster"), "hostfile", named, accepted)
        return ImportedHosts()
    return read_hostfile(faults, Path(resolved(named, base)))


def _check_job_paths(faults: Faults, job: ReadJob, nodes: Sequence[NodeConfig]) -> None:
    """~somebody is a user of this machine, and need not be one elsewhere."""
    # What is no host at all has been said by now.
    if all(host_form(node.ssh) is not None or node.local for node in nodes):
        return
    for key in PATH_KEYS:
        value = job.settings.get(key)
        if isinstance(value, str) and value.startswith("~") and (accepted := remote_path_form(value)):
            faults.add(job.places[key], key, value, accepted)


def _check_preflight_paths(faults: Faults, place: Place, preflight: PreflightConfig | None) -> None:
    if preflight is None:
        return
    if accepted := path_form(preflight.sync_script):
        faults.add(place, "sync_script", preflight.sync_script, accepted)
    for number, root in enumerate(preflight.roots):
        if accepted := remote_path_form(root):
            faults.add(place, f"roots[{number}]", root, accepted)


def _check_destination(
    faults: Faults, place: Place, checkpoint: CheckpointConfig | None, nodes: Sequence[NodeConfig | None]
) -> None:
    """A path is the node's own, as those of [job] are; an address is for the node's fsspec to understand."""
    if checkpoint is None or checkpoint.destination is None:
        return
    named = checkpoint.destination
    if "://" in named:
        if not _ADDRESS.fullmatch(named):
            faults.add(place, "destination", named, "an address such as s3://bucket/folder, without blanks")
        return
    local = all(node is None or host_form(node.ssh) is not None or node.local for node in nodes)
    if accepted := path_form(named) if local or not named.startswith("~") else remote_path_form(named):
        faults.add(place, "destination", named, f"{accepted}; or an address such as s3://bucket/folder")


def _with_job(node: NodeConfig, model: str | None, data: str | None, base: Path) -> NodeConfig:
    """The node with the job's model and data as they are on it, where it names no others."""
    job = {"model": model, "data": data}
    paths = {key: on_node(path, node, base) for key, path in job.items() if path and not getattr(node, key)}
    return node.model_copy(update=paths)


def _table(faults: Faults, file: str, document: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name, {})
    if isinstance(found, dict):
        return found
    faults.add(Place(file), name, found, f"one table: [{name}] on a line of its own, its keys below")
    return {}


def _section(faults: Faults, file: str, document: Mapping[str, Any], name: str, kind: type[Section]) -> Section | None:
    table, place = _table(faults, file, document, name), Place(file, name)
    faults.unknown(place, table, kind.model_fields, {})
    return faults.validated(place, kind, table)
