"""Loads a Config from flightdeck.toml, or reports all its faults at once, including those between several keys;
and names what it makes run, here and on the nodes, which a person accepts, once for each content."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.config.cluster_tables import node_tables, read_cluster, read_defaults, read_nodes
from engine.config.documents import file_text, read_toml
from engine.config.faults import FileTable
from engine.config.formats import address_form, path_form, remote_path_form, resolved, split_form
from engine.config.imported_hosts import ImportedHosts, read_hostfile
from engine.config.job_table import PATH_KEYS, ReadJob, read_job
from engine.config.mlx_lm_keys import LOCAL_KEYS
from engine.config.models import (
    SECTIONS,
    TABLES,
    CheckpointConfig,
    Config,
    JobConfig,
    NodeConfig,
    PreflightConfig,
    RecoveryConfig,
    on_node,
)
from engine.config.overrides import attributed, grid, named, overridden
from engine.errors import ConfigError
from engine.job.traits import PARTITIONED
from engine.protocol.job import Framework
from engine.security.identifiers import LOCAL
from engine.security.redact import is_public

MAX_PORT = 65535


def _check_nodes(nodes: Sequence[FileTable]) -> None:
    """Names and addresses must be unique."""
    first: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        name = node.get("name")
        if isinstance(name, str) and first.setdefault(name, rank) != rank:
            node.refuse("name", f"a unique name: node[{first[name]}] has this one", name)
    hosts = [str(node.get("ssh", LOCAL)) for node in nodes]
    if len(set(hosts)) == 1:
        return
    first = {}
    for rank, node in enumerate(nodes):
        for number, address in enumerate(_listed(node, "ips")):
            if not isinstance(address, str) or address_form(address) is not None:
                continue
            if ipaddress.IPv4Address(address).is_loopback:
                accepted = "an address at which the other hosts can reach this one, or none, to have it chosen"
                node.refuse(f"ips[{number}]", accepted, address)
            elif hosts[first.setdefault(address, rank)] != hosts[rank]:
                accepted = f"a unique address: node[{first[address]}] is another host and has this one"
                node.refuse(f"ips[{number}]", accepted, address)


def _check_devices(nodes: Sequence[FileTable], backend: str) -> None:
    """A complete matrix of RDMA devices must connect the ranks as the backend needs it."""
    size = len(nodes)
    if backend not in ("jaccl", "jaccl-ring") or not all(len(_listed(node, "rdma")) == size for node in nodes):
        return
    for rank, node in enumerate(nodes):
        row = _listed(node, "rdma")
        peers = {(rank - 1) % size, (rank + 1) % size} if backend == "jaccl-ring" else set(range(size))
        missing = [str(peer) for peer in sorted(peers - {rank}) if row[peer] in ("", None)]
        if missing:
            node.refuse("rdma", f"a device for rank {' and '.join(missing)} too: {backend} needs it", row)


def _check_framework(cluster: FileTable, backend: str, nodes: Sequence[FileTable], framework: Framework) -> None:
    """Report what belongs to the other framework."""
    if framework == "torch" and backend not in ("auto", "nccl", "gloo"):
        cluster.refuse("backend", "auto, nccl or gloo: PyTorch has no other", backend)
    elif framework == "mlx" and backend == "gloo":
        cluster.refuse("backend", 'auto, ring, jaccl, jaccl-ring or nccl, or framework = "torch"', backend)
    for node in nodes:
        for key in ("validate", "rdma") if framework == "torch" else ("processes",) * ("rdma" in node):
            if key in node:
                why = "framework torch" if framework == "torch" else "rdma: one [[node]] for each rank"
                node.refuse(key, f"no value here, with {why}")


def _by_process(
    tables: Sequence[FileTable], nodes: Sequence[NodeConfig | None]
) -> tuple[list[FileTable], tuple[NodeConfig | None, ...]]:
    """Tables and nodes, with those of several processes once for each."""
    repeated: list[tuple[FileTable, NodeConfig | None]] = []
    for table, node in zip(tables, nodes, strict=True):
        names = [f"{node.name}.{process}" for process in range(node.processes)] if node and node.processes > 1 else []
        repeated += [
            (table.at(table.name, {**table, "name": name}), node and node.model_copy(update=one))
            for name in names
            for one in [{"name": name, "processes": 1}]
        ] or [(table, node)]
    return [table for table, _ in repeated], tuple(node for _, node in repeated)


def _check_ports(cluster: FileTable, nodes: Sequence[FileTable], first: int | None) -> None:
    """Every address of a rank needs a port."""
    ports = sum(len(_listed(node, "ips")) or 1 for node in nodes)
    if first is not None and nodes and first + ports - 1 > MAX_PORT:
        cluster.refuse("starting_port", f"a port that is the first of {ports} ports up to {MAX_PORT}", first)


def _listed(node: FileTable, key: str) -> list[object]:
    return values if isinstance(values := node.get(key), list) else []


def _check_command(tables: Sequence[FileTable]) -> None:
    accepted = "no value here: the job is a command, which has its own"
    for key in ("model", "data", "share", "validate"):
        for table in tables:
            if key in table:
                table.refuse(key, accepted)


def _check_training(inline: FileTable, tables: Sequence[FileTable], job: ReadJob) -> None:
    nodes, settings, config = len(tables), job.settings, job.config
    batch_size = settings.get("batch_size")
    strategy = config.strategy if config is not None else None
    if strategy == "pipeline" and nodes < 2:
        inline.refuse("strategy", "data or sharded: a pipeline needs at least two nodes", "pipeline")
    if strategy == "local" and nodes < 2:
        inline.refuse("strategy", "data: local averages the weights of at least two nodes", "local")
    _check_validation(tables, strategy, settings)
    split = config.layer_split if config is not None else None
    if split is not None and (accepted := split_form(split, nodes)) is not None:
        inline.refuse("layer_split", accepted, split)
    # In a pipeline every node processes the whole batch.
    too_small = batch_size is not None and batch_size < nodes and strategy != "pipeline"
    int8, not_local = strategy in PARTITIONED and settings.get("wire") == "int8", strategy not in (None, "local")
    iters, unvalidated = settings.get("iters"), settings.get("val_batches") == 0
    never = iters is not None and settings.get("grad_accumulation_steps", 0) > iters
    twice = iters is not None and settings.get("epochs") is not None
    both = batch_size is not None and settings.get("batch_tokens") is not None
    no_judge = "no value here: val_batches = 0, so that there is no validation to judge by"
    for key, applies, accepted in (
        ("wire", int8, f'auto or float32: strategy = "{strategy}" sends no int8'),
        *((key, not_local and key in job.locations, 'no value here, unless strategy = "local"') for key in LOCAL_KEYS),
        ("batch_size", too_small, f"{nodes} or more: the global batch is divided over {nodes} nodes"),
        ("grad_accumulation_steps", never, f"at most iters = {iters}, since otherwise the model is never updated"),
        ("batch_tokens", both, "no value here: batch_size is set, and it is one or the other"),
        ("epochs", twice, "no value here: iters is set, and it is one or the other"),
        *((key, unvalidated and settings.get(key), no_judge) for key in ("save_best", "patience")),
    ):
        # A key of the other framework is unused, and no setting.
        if applies and key in settings:
            job.locations.get(key, inline).refuse(key, accepted, settings[key])


def _check_validation(tables: Sequence[FileTable], strategy: str | None, settings: Mapping[str, Any]) -> None:
    kept_out = [table for table in tables if table.get("validate") is False]
    if strategy in PARTITIONED and kept_out:
        accepted = f'no value here: with strategy = "{strategy}" every node computes a part of each validation'
        kept_out[0].refuse("validate", accepted, False)
    elif len(kept_out) == len(tables) and (settings.get("val_batches") or settings.get("test")):
        accepted = "true on one node at least, or val_batches = 0 and no test in [job]"
        kept_out[0].refuse("validate", accepted, False)


_HINTS = {"nodes": "[[node]], one table per rank"}

_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[\x21-\x7e]{1,1000}")


def load_config(path: Path, overrides: Mapping[str, Any] = {}, text: str | None = None) -> Config:
    """A file's configuration with other values of some keys, or that of a `text` which is to be in it. Raises
    ConfigError with all faults, and nothing else."""
    file, name = path.absolute(), file_text(path)
    document, keys = overridden(read_toml(path, text), overrides, file.parent)
    try:
        loaded = read_document(FileTable(name, "", document), file.parent)
    except ConfigError as error:
        raise ConfigError(attributed(error.faults, keys, name, "--set")) from None
    loaded = loaded.model_copy(update={"file": file, "overrides": dict(overrides)})
    return loaded.model_copy(update={"digest": programs_digest(loaded)})


def load_grid(path: Path, texts: Sequence[str]) -> list[Config]:
    """The configuration of each run that `key=value` texts ask for, with a job name of its own. Raises ConfigError,
    InputError."""
    runs = grid(texts)
    if len(runs) > 1:
        runs = named([load_config(path, run).job.name for run in runs], runs)
    return [load_config(path, run) for run in runs]


def read_document(here: FileTable, folder: Path) -> Config:
    """The configuration of a file's tables, whose relative paths begin in `folder`. Raises ConfigError with all faults,
    those that the tables have already among them."""
    here.unknown(TABLES, _HINTS)
    cluster_table, job_table = here.table("cluster"), here.table("job")
    cluster = read_cluster(cluster_table)
    defaults = read_defaults(here.table("node_defaults"))
    imported = _read_hostfile(cluster_table, folder)
    tables = imported.tables if imported else node_tables(here)
    if imported and here.get("node"):
        here.refuse("node", "no value here: [cluster] hostfile names the nodes; remove one of the two")
    if cluster is not None and imported and imported.backend and "backend" not in cluster_table:
        cluster = cluster.model_copy(update={"backend": imported.backend})
    framework: Framework = "torch" if job_table.get("framework") == "torch" else "mlx"
    nodes = read_nodes(tables, defaults, folder, framework)
    job = read_job(job_table, folder)
    if cluster is not None:
        _check_framework(cluster_table, cluster.backend, tables, framework)
    if job_table.get("elastic") is not True:
        # From here on every process is a node.
        tables, nodes = _by_process(tables, nodes)
    sections = _read_sections(here, nodes, job.data)
    _check_nodes(tables)
    if cluster is not None:
        _check_devices(tables, cluster.backend)
        _check_ports(cluster_table, tables, cluster.starting_port)
    if job.is_command:
        _check_command([*tables, defaults])
        if "data" in here:
            here.refuse("data", "no value here: the job is a command, which has its own")
    elif tables:
        _check_training(job_table, tables, job)
    good = tuple(node for node in nodes if node is not None)
    _check_job_paths(job, good)
    config = job.config
    if config is not None and framework == "torch":
        _check_torch(here, config, sections, len(nodes))
    if here.faults or cluster is None or config is None:
        raise ConfigError(here.faults)
    if imported and imported.env:
        config = config.model_copy(update={"env": {**imported.env, **config.env}})
    placed = tuple(_with_job(node, config.model, config.data, folder) for node in good)
    return Config(cluster=cluster, nodes=placed, job=config, **sections)


def _read_sections(here: FileTable, nodes: Sequence[NodeConfig | None], of_hub: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of SECTIONS; None for one with faults. `of_hub`: keys of [data] that hf_dataset stands for."""
    sections = {}
    for name, kind in SECTIONS.items():
        table = here.table(name)
        table.unknown(kind.model_fields, {})
        if name == "data":
            for key in of_hub.keys() & table.keys():
                table.refuse(key, "no value here: hf_dataset of [job] names it")
            table.update(of_hub)
        section = sections[name] = table.validated(kind, table)
        if isinstance(section, CheckpointConfig):
            _check_destination(table, section.destination, nodes)
        elif isinstance(section, RecoveryConfig) and (section.min_nodes or 0) > len(nodes) > 0:
            table.refuse("min_nodes", f"at most {len(nodes)}, the number of nodes")
    return sections


def _check_torch(here: FileTable, job: JobConfig, sections: Mapping[str, Any], nodes: int) -> None:
    """Check sections for values that a PyTorch job does not have."""
    checkpoint, recovery = sections["checkpoint"], sections["recovery"]
    saves = checkpoint is not None and checkpoint.enabled and job.kind.own_model is None
    if saves and "://" in (checkpoint.destination or ""):
        accepted = 'a folder with framework = "torch", no URL'
        here.at("checkpoint").refuse("destination", accepted, checkpoint.destination)
    if saves and job.mlx_lm.get("offload") == "nvme":
        accepted = "false: of what is offloaded to nvme there is no checkpoint"
        here.at("checkpoint").refuse("enabled", accepted, True)
    restarts = recovery is not None and job.kind.loss_restarts_workers
    if restarts and not recovery.max_restarts and (recovery.min_nodes or nodes) < nodes:
        accepted = "1 or more: when a node is lost, torchrun starts the others' workers again; or leave out min_nodes"
        here.at("recovery").refuse("max_restarts", accepted, 0)


def _read_hostfile(cluster: FileTable, base: Path) -> ImportedHosts | None:
    """The nodes of [cluster] hostfile; None if it is not set."""
    named = cluster.get("hostfile")
    if not isinstance(named, str):
        return None
    if accepted := path_form(named):
        cluster.refuse("hostfile", accepted)
        return ImportedHosts()
    return read_hostfile(Path(resolved(named, base)), cluster.faults)


def _check_job_paths(job: ReadJob, nodes: Sequence[NodeConfig]) -> None:
    """`~user` is only valid on this machine."""
    if all(node.local for node in nodes):
        return
    for key in PATH_KEYS:
        value = job.settings.get(key)
        if isinstance(value, str) and value.startswith("~") and (accepted := remote_path_form(value)):
            job.locations[key].refuse(key, accepted, value)


def _check_destination(table: FileTable, named: str | None, nodes: Sequence[NodeConfig | None]) -> None:
    """The destination is a path on the node, or a URL for fsspec there."""
    if named is None:
        return
    if "://" in named:
        if not _URL.fullmatch(named):
            table.refuse("destination", "a URL such as s3://bucket/folder, without spaces", named)
        return
    local = all(node is None or node.local for node in nodes)
    if accepted := path_form(named) if local or not named.startswith("~") else remote_path_form(named):
        table.refuse("destination", f"{accepted}; or a URL such as s3://bucket/folder", named)


def _with_job(node: NodeConfig, model: str | None, data: str | None, base: Path) -> NodeConfig:
    """The node with the job's model and data, unless it sets its own."""
    job = {"model": model, "data": data}
    paths = {key: on_node(path, node, base) for key, path in job.items() if path and not getattr(node, key)}
    return node.model_copy(update=paths)


def named_programs(config: Config, *, launch: bool) -> list[tuple[str, str]]:
    """Where or as what each runs, and its name: as soon as the nodes are asked and checks are made, and with `launch`
    also the command. Empty where the interpreter that runs flightdeck does all, on this machine and unchanged."""
    nodes = [node for node in config.nodes if not (node.local and node.python == sys.executable)]
    programs = [("this machine" if node.local else node.ssh, node.python) for node in nodes]
    if launch and config.job.words:
        programs.append(("the command", shlex.join(config.job.words)))
    programs += [("sync_script", str(path)) for path in _sync_script(config)]
    if config.job.mlx_lm.get("trust_remote_code"):
        programs += [("the model's own code", f"{node.model} (trust_remote_code)") for node in config.nodes]
    if variables := _variables(config.job):
        programs.append(("with the variables", ", ".join(variables)))
    programs += _receivers(config) if launch else []
    return list(dict.fromkeys(programs))


def _sync_script(config: Config) -> list[Path]:
    """The script, if it is there and another than the usual one."""
    script = config.preflight.sync_script
    # Such as ~nobody, or below a folder of another user: it is not run either.
    with contextlib.suppress(RuntimeError, OSError):
        path = Path(script).expanduser()
        return [path] * (script != PreflightConfig().sync_script and path.is_file())
    return []


def programs_digest(config: Config) -> str:
    """SHA-256 of what the configuration makes run: the hosts, interpreters, command and variables of `named_programs`,
    and the content of what runs here before a launch."""
    job, files = config.job, _sync_script(config)
    nodes = [(node.ssh, node.python, node.workdir) for node in config.nodes]
    digest = hashlib.sha256(repr((nodes, job.words, [(name, job.env[name]) for name in _variables(job)])).encode())
    if job.mlx_lm.get("trust_remote_code"):
        digest.update(f"trust_remote_code {[node.model for node in config.nodes]}".encode())
        folders = {Path(node.model) for node in config.nodes if node.local and node.model is not None}
        files += sorted(file for folder in folders for depth in ("*.py", "*/*.py") for file in folder.glob(depth))
    if config.notify.active:
        digest.update(repr((config.notify.command, config.notify.webhooks, config.notify.apprise)).encode())
    for file in files:
        # A FIFO would be waited for.
        with contextlib.suppress(OSError):
            digest.update(str(file).encode() + (file.read_bytes() if file.is_file() else b""))
    return digest.hexdigest()


def _receivers(config: Config) -> list[tuple[str, str]]:
    """Programs and hosts that notifications go to. Another part of an address may be a secret."""
    notify, to = config.notify, "a notification to"
    webhooks = [(urlsplit(webhook.url).hostname or webhook.url, webhook.token) for webhook in notify.webhooks]
    receivers = [(to, f"{host} with {token}" if token else host) for host, token in webhooks]
    receivers += [(to, f"{address} by apprise") for address in notify.apprise]
    return [*([("the notify command", shlex.join(notify.command))] if notify.command else []), *receivers]


def _variables(job: JobConfig) -> list[str]:
    """Among them may be LD_PRELOAD and PYTHONPATH."""
    return [name for name in job.env if not is_public(name) or name.endswith("PLUGIN")]
