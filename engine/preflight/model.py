"""model_present: configuration, tokenizer and all safetensors shards lie where each node looks for them."""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus
from engine.preflight.check import Check, ranks_of, trains, verdict

NAME = "model_present"
CONFIGURATION = "config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelFiles:
    """What lies in one model directory."""

    kind: str = "?"
    """model_type of config.json."""
    bytes: int = 0
    shards: int = 0
    faults: list[str] = field(default_factory=list)
    repository: str | None = None
    """Where config.json says that it came from, as ORG/NAME."""

    def words(self) -> str:
        if self.faults:
            return "; ".join(self.faults)
        return f"{self.kind}, {self.shards} shard{'s' * (self.shards != 1)}, {self.bytes / 1e6:,.1f} MB"


async def look(config: FlightConfig) -> CheckResult:
    wanted = {node.name: node.model or config.job.model or "" for node in config.nodes}
    paths = list(dict.fromkeys(wanted.values()))
    found = dict(zip(paths, await asyncio.gather(*(asyncio.to_thread(read, Path(p)) for p in paths)), strict=True))
    faults: dict[str, str] = {}
    fixes: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(config):
        files = found[wanted[node.name]]
        if files.faults:
            faults[node.name] = f"{wanted[node.name]}: {files.words()}"
            blames = blames or (rank, node.name)
            if files.repository:
                fixes[node.name] = f"hf download {files.repository} --local-dir {shlex.quote(wanted[node.name])}"
    evidence = {name: f"{path}: {found[path].words()}" for name, path in wanted.items()}
    if faults:
        summary = "; ".join(dict.fromkeys(faults.values()))
        if not fixes:
            summary += "; set `model` in [job] to a directory with an mlx-lm model"
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    kinds = {files.words() for files in found.values()}
    if len(kinds) > 1:
        summary = f"the nodes hold different models: {' against '.join(sorted(kinds))}"
        return verdict(NAME, CheckStatus.FAIL, summary + "; copy rank 0's to the others", evidence=evidence)
    return verdict(NAME, CheckStatus.PASS, kinds.pop(), evidence=evidence)


def read(directory: Path) -> ModelFiles:
    """Look into a model directory without loading anything of it."""
    if not directory.is_dir():
        return ModelFiles(faults=[f"no such directory{near(directory, 'config.json')}"])
    faults: list[str] = []
    kind, repository = "?", None
    try:
        configuration = json.loads((directory / CONFIGURATION).read_bytes())
        kind = str(configuration["model_type"])
        name = configuration.get("_name_or_path")
        repository = name if isinstance(name, str) and _REPOSITORY.fullmatch(name) else None
    except FileNotFoundError:
        faults.append("config.json is missing")
    except (ValueError, KeyError, TypeError, AttributeError):
        faults.append("config.json is no model configuration (JSON with a model_type)")
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        faults.append("no tokenizer (tokenizer.json or tokenizer.model)")
    shards = sorted(directory.glob("model*.safetensors"))
    faults += _shard_faults(directory, {shard.name for shard in shards})
    return ModelFiles(kind, sum(shard.stat().st_size for shard in shards), len(shards), faults, repository)


def _shard_faults(directory: Path, present: set[str]) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = {str(file) for file in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"{index.name} has no weight_map"]
        missing = sorted(named - present)
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            return [f"{len(missing)} of {len(named)} shards missing: {shown}"]
    if not present:
        return ["no weights (model*.safetensors)"]
    empty = sorted(name for name in present if (directory / name).stat().st_size <= 8)
    return [f"empty: {', '.join(empty)}"] if empty else []


def near(path: Path, holding: str = "") -> str:
    """ ", did you mean …?" for a path whose parent has something of a similar name; `holding` is a file that must be
    in it."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if (entry / holding).exists()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f", did you mean {path.parent / close[0]}?" if close else ""


CHECK = Check(NAME, "config.json, tokenizer and all safetensors shards", look, time_limit_s=30, not_applicable=trains)
