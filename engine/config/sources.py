"""Where the values of a configuration come from, and where its faults are; and the configurations of a folder."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from engine.config.documents import read_text, read_toml, read_yaml, yaml_lines
from engine.config.draft import toml_value
from engine.config.formats import resolved
from engine.config.job_table import FEATURES, HUB, OWN_KEYS
from engine.config.load import load_config
from engine.config.mlx_lm_keys import KEYS
from engine.config.models import SECTIONS, Config, NodeConfig
from engine.config.overrides import overridden
from engine.errors import ConfigError, ConfigFault, plural
from engine.protocol.job import AUTO
from engine.security.redact import REDACTED, is_public, redact
from engine.security.sanitise import sanitise_text

DEFAULT: Final = "default"
PLAN: Final = "the plan"
_MOST_FILES: Final = 50
_SHOWN: Final = 200
"""Characters of a line of a file."""
_OURS: Final = re.compile(r"^\s*(\[\[node\]\]|\[job\])", re.MULTILINE)
TomlPath = tuple[str | int, ...]
_OF_HUB: Final = (
    *(("job", key) for key in ("data", *FEATURES)),
    *(("data", *keys) for keys in (("subset",), *(("splits", split) for split in ("train", "valid", "test")))),
)
"""The keys that hf_dataset stands for."""


@dataclass(frozen=True)
class ConfigValue:
    """An effective value and where it was set."""

    key: str
    """As --set takes it: "learning_rate", "checkpoint.every", "node.ultra.python"."""
    value: Any
    """Without secrets."""
    source: str
    """"flightdeck.toml:12", "lora.yaml:3", "--set", "default"; "the plan" of what is its to choose."""
    place: tuple[Path, int | None] | None = None
    """The file, and its line, from 1."""

    @property
    def text(self) -> str:
        """The value as TOML has it."""
        return "none" if self.value is None else toml_value(self.value)


@dataclass(frozen=True)
class PlacedFault:
    fault: ConfigFault
    line: int | None = None
    text: str = ""
    """The line's, without control characters and secrets."""

    @property
    def where(self) -> str:
        return f"line {self.line}" if self.line is not None else Path(self.fault.file).name

    @property
    def place(self) -> tuple[Path, int | None] | None:
        """None of what was set beside the file."""
        return (Path(self.fault.file), self.line) if Path(self.fault.file).is_file() else None

    @property
    def what(self) -> str:
        return str(self.fault).removeprefix(f"{self.fault.file}: ")


@dataclass(frozen=True)
class FoundConfiguration:
    path: Path
    config: Config | None
    fault: str = ""
    """The first, of one that is refused."""

    @property
    def about(self) -> str:
        return f"{self.config.job.name} on {plural(len(self.config.nodes), 'node')}" if self.config is not None else ""


def effective(
    file: Path, overrides: Mapping[str, Any] = {}, *, every: bool = False, chosen: Mapping[str, Any] = {}
) -> list[ConfigValue]:
    """The values of a file with `overrides` that are set, and all of the job's; with `every` all others, too. `chosen`:
    values that a plan gives keys for which the file says "auto" or nothing. Raises ConfigError."""
    config = load_config(file, overrides)
    sources, redact = _Sources(config, file), config.job.redactor()
    values = []
    for path, name, value in values_of(sources.config):
        source, place = sources.of(path)
        if value in (None, AUTO) and chosen.get(name) is not None:
            value, source = chosen[name], PLAN
        if not every and (value is None or (source == DEFAULT and path[0] != "job")):
            continue
        public = path[:2] != ("job", "env") or is_public(str(path[-1]))
        values.append(ConfigValue(name, redact.document(value) if public else REDACTED, source, place))
    return values


def values_of(config: Config) -> Iterator[tuple[TomlPath, str, Any]]:
    """Each value with its place in the file's tables, a node's by its number, and its name for --set."""
    yield from _flat(config.cluster, ("cluster",), "cluster.")
    for rank, node in enumerate(config.nodes):
        yield from _flat(node, ("node", rank), f"node.{node.name}.")
    job = config.job
    rest = job.model_dump(mode="json", include={*OWN_KEYS} - {"script"})
    yield from _flat(
        rest | {key: job.mlx_lm.get(key) for key in KEYS if not job.words or key in job.mlx_lm}, ("job",), ""
    )
    for name in SECTIONS:
        yield from _flat(getattr(config, name), (name,), f"{name}.")


def _flat(values: BaseModel | Mapping[str, Any], path: TomlPath, name: str) -> Iterator[tuple[TomlPath, str, Any]]:
    if isinstance(values, BaseModel):
        values = values.model_dump(mode="json", by_alias=True)
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, key), f"{name}{key}.")
        else:
            yield (*path, key), f"{name}{key}", value


class _Sources:
    """The files that a configuration was read from."""

    def __init__(self, config: Config, file: Path) -> None:
        self._file = file
        self._document = read_toml(file)
        changed, self._set = overridden(self._document, config.overrides, config.folder)
        job = self._job = changed["job"]
        self._yaml = Path(resolved(job["config"], config.folder)) if job.get("config") else None
        self._keys = read_yaml(self._yaml) if self._yaml is not None else {}
        hostfile = config.cluster.hostfile
        self._hostfile = Path(hostfile).name if hostfile is not None else None
        usual = changed.get("node_defaults", {}).get("processes", 1)
        counts = [1 if job.get("elastic") else table.get("processes", usual) for table in changed.get("node", ())]
        ranks, nodes = iter(config.nodes), list[NodeConfig]()
        for count in counts:
            node, *_ = itertools.islice(ranks, count)
            named = {"name": node.name.rpartition(".")[0], "processes": count}
            nodes.append(node.model_copy(update=named) if count > 1 else node)
        self.config = config.model_copy(update={"nodes": tuple(nodes) or config.nodes})
        """With a node for each [[node]], whatever its `processes`."""

    def of(self, path: TomlPath) -> tuple[str, tuple[Path, int | None] | None]:
        """The source of a value, with file and line where it has some."""
        table, *names = path
        if table == "node":
            _, key, *_ = names
            if self._hostfile is not None and key in ("name", "ssh", "ips", "rdma"):
                return self._hostfile, None
            if _value(self._document, path) is None:
                path = ("node_defaults", key)
                if key in ("model", "data") and _value(self._document, path) is None:
                    return self.of(("job", key))
        if path in _OF_HUB and (HUB in self._job or (HUB in self._keys and "data" not in self._job)):
            return self.of(("job", HUB))
        dotted = ".".join(f"[{part}]" if isinstance(part, int) else part for part in path).replace(".[", "[")
        if any(f"{dotted}.".startswith(f"{key}.") for key in self._set):
            return "--set", None
        auto = " (auto)" if path == ("job", "learning_rate") else ""
        for file, value, key in (
            (self._file, _value(self._document, path), dotted),
            (self._yaml, _value(self._keys, tuple(names)) if table == "job" else None, dotted.removeprefix("job.")),
        ):
            if file is not None and value is not None:
                line, _ = line_of(file, key) or (None, "")
                number = f":{line}" if line is not None else ""
                return f"{file.name}{number}{auto * (value == AUTO)}", (file, line)
        inherited = self._hostfile if path[:2] == ("job", "env") else None
        return inherited or DEFAULT, None


def _value(document: Any, path: TomlPath) -> Any:
    """The one at that place; None where there is none."""
    for part in path:
        if isinstance(document, list) and isinstance(part, int):
            document = document[part]
        else:
            document = document.get(part) if isinstance(document, Mapping) else None
    return document


def placed(error: ConfigError) -> list[PlacedFault]:
    """Each fault, with its line of the file where it has one."""
    faults = []
    for fault in error.faults:
        line, text = line_of(Path(fault.file), fault.key) or (None, "")
        # Where the value is a secret, so may be whatever else stands there.
        shown = "" if REDACTED in fault.value else redact(sanitise_text(text).strip())
        faults.append(PlacedFault(fault, line, shown[:_SHOWN]))
    return faults


def line_of(path: Path, key: str) -> tuple[int, str] | None:
    """The line, from 1, and the text there of a ConfigFault's key in a TOML or YAML file; None where it has
    none."""
    try:
        text = read_text(path, "")
        if path.suffix in (".yaml", ".yml") and (place := yaml_lines(path).get(key)) is not None:
            # YAML has the other ends of lines, too.
            return place, text.splitlines()[place - 1]
    except ConfigError:
        return None
    lines = text.split("\n")
    if number := re.fullmatch(r"line ([0-9]+)", key):
        place = int(number[1])
        return (place, lines[place - 1]) if place <= len(lines) else None
    table, count = "", Counter[str]()
    for place, text in enumerate(lines, 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w. -]+?)\s*\]", text):
            table = header[2] if header[1] == "[" else f"{header[2]}[{count[header[2]]}]"
            count[header[2]] += 1
        name = re.match(r"\s*([\w.-]+)\s*=", text)
        if name is not None and re.fullmatch(rf"{re.escape(f'{table}.{name[1]}'.lstrip('.'))}(\[.*|\..*)?", key):
            return place, text
    return None


def configurations(folder: Path) -> list[FoundConfiguration]:
    """The files of a folder that have nodes or a job, in the order of their names."""
    files = []
    for path in sorted(folder.glob("*.toml"))[:_MOST_FILES]:
        try:
            if re.search(_OURS, read_text(path, "")):
                files.append(FoundConfiguration(path, load_config(path)))
        except ConfigError as error:
            files.append(FoundConfiguration(path, None, str(error.faults[0]).removeprefix(f"{path}: ")))
    return files
