"""The JSON Schema of flightdeck.toml, from the configuration's models and the table of the job's keys."""

from __future__ import annotations

import inspect
import json
from typing import Any

from pydantic import BaseModel, TypeAdapter

from engine.config.cluster_tables import NODE_PATHS
from engine.config.draft import SCHEMA
from engine.config.job_table import OWN_KEYS
from engine.config.mlx_lm_keys import DEFAULTS, KEYS, SIZE_KEYS
from engine.config.models import SECTIONS, ClusterConfig, JobConfig, NodeConfig
from tests.docs.configuration import field_docstrings


def schema() -> dict[str, Any]:
    """Every table with its keys; what values of several keys must be together is only checked when the file is read."""
    parts: dict[str, Any] = {}
    node = _table(NodeConfig, parts)
    job = _table(JobConfig, parts)
    own = {key: job["properties"][key] for key in OWN_KEYS}
    tables = {
        "cluster": _table(ClusterConfig, parts),
        "node_defaults": {**node, "properties": {key: node["properties"][key] for key in NODE_PATHS}},
        "node": {"type": "array", "items": node},
        "job": {**job, "properties": own | {key: _key(key, parts) for key in KEYS}},
        **{name: _table(model, parts) for name, model in SECTIONS.items()},
    }
    used = {name: part for name, part in parts.items() if f'"#/$defs/{name}"' in json.dumps([tables, parts])}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "flightdeck.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": tables,
        "$defs": used,
    }


def _table(model: type[BaseModel], parts: dict[str, Any]) -> dict[str, Any]:
    """Without required keys: those depend on other ones."""
    made = _plain(model.model_json_schema(by_alias=True), parts)
    texts = field_docstrings(model)
    aliases = {field.alias or name: name for name, field in model.model_fields.items()}
    for key, form in made["properties"].items():
        form["description"] = texts.get(aliases[key], "")
    return {
        "type": "object",
        "description": inspect.cleandoc(model.__doc__ or "").replace("\n", " "),
        "additionalProperties": False,
        "properties": made["properties"],
    }


def _key(name: str, parts: dict[str, Any]) -> dict[str, Any]:
    key = KEYS[name]
    form = _plain(TypeAdapter(key.form.type).json_schema(), parts)
    if name in SIZE_KEYS:
        form = {"anyOf": [form, {"type": "string"}]}
    default = {} if DEFAULTS.get(name) is None else {"default": DEFAULTS[name]}
    return {**form, **default, "description": f"{key.meaning} Accepted: {key.form.accepted}."}


def _plain(form: Any, parts: dict[str, Any]) -> Any:
    """Without titles and nulls, which TOML has none of; its definitions are put into `parts`."""
    if isinstance(form, list):
        return [_plain(part, parts) for part in form if part != {"type": "null"}]
    if not isinstance(form, dict):
        return form
    parts.update({name: _plain(part, parts) for name, part in form.get("$defs", {}).items()})
    return {
        key: {name: _plain(part, parts) for name, part in value.items()}
        if key == "properties"
        else _plain(value, parts)
        for key, value in form.items()
        if key not in ("$defs", "title", "required") and not (key == "default" and value is None)
    }


def written() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def write() -> None:
    SCHEMA.write_text(written(), encoding="utf-8")
