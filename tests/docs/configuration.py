"""The tables of docs/configuration.md, from the docstrings and types of the configuration models."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.config.cluster_tables import NODE_PATHS
from engine.config.faults import bound_text
from engine.config.job_table import OWN_KEYS
from engine.config.mlx_lm_keys import DEFAULTS, KEYS
from engine.config.models import Config, NodeConfig, WebhookConfig

_TABLES: Final = {
    "[cluster]": "cluster",
    "[[node]]": "nodes",
    "[job]": "job",
    "[data]": "data",
    "[preflight]": "preflight",
    "[consistency]": "consistency",
    "[calibration]": "calibration",
    "[checkpoint]": "checkpoint",
    "[recovery]": "recovery",
    "[notify]": "notify",
    "[environment]": "environment",
    "[ui]": "ui",
}
_HEADER: Final = ["| key | type | default | meaning |", "|---|---|---|---|"]
_MLX_LM_HEADER: Final = ["| key | accepted | default | meaning |", "|---|---|---|---|"]
_DEFAULT: Final = re.compile(r"\s*Default: (?P<default>.+)\.?$")


def configuration() -> str:
    """Every table of flightdeck.toml with its keys."""
    assert set(_TABLES.values()) == Config.model_fields.keys() - {"file", "digest", "overrides"}
    return "\n\n".join(_table(title, _model(Config.model_fields[name])) for title, name in _TABLES.items())


def _table(title: str, model: type[BaseModel]) -> str:
    names: Iterable[str] = OWN_KEYS if title == "[job]" else model.model_fields
    meanings = field_docstrings(model)
    rows = [_row(model.model_fields[name].alias or name, model.model_fields[name], meanings[name]) for name in names]
    parts = [f"## `{title}`", inspect.cleandoc(model.__doc__ or "").replace("\n", " "), "\n".join([*_HEADER, *rows])]
    if title == "[[node]]":
        paths = ", ".join(f"`{name}`" for name in NODE_PATHS)
        parts.append(f"`[node_defaults]` is a table with {paths}, for every node that does not set them.")
    if title == "[notify]":
        parts.append(_table("[[notify.webhooks]]", WebhookConfig).replace("## ", "### ", 1))
    if title == "[job]":
        parts += ["### mlx-lm keys", "\n".join([*_MLX_LM_HEADER, *map(_mlx_lm_row, KEYS)])]
    return "\n\n".join(parts)


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a model."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(after.value.value).split())
    return found


def _row(name: str, field: FieldInfo, text: str) -> str:
    stated = _DEFAULT.search(text)
    if stated is not None:
        default = stated["default"].removesuffix(".")
    elif field.is_required():
        default = "required"
    else:
        default = f"`{_toml(field.default)}`"
    return _line(name, _type(field), default, _DEFAULT.sub("", text))


def _mlx_lm_row(name: str) -> str:
    key = KEYS[name]
    default = "required" if name in ("model", "data") else "none"
    if DEFAULTS.get(name) is not None:
        default = f"`{_toml(DEFAULTS[name])}`"
    return _line(name, key.form.accepted, default, key.meaning)


def _line(name: str, *cells: str) -> str:
    return " | ".join([f"| `{name}`", *(cell.replace("|", "\\|") for cell in cells)]) + " |"


def _model(field: FieldInfo) -> type[BaseModel]:
    annotation = field.annotation
    if annotation == tuple[NodeConfig, ...]:
        return NodeConfig
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation


def _type(field: FieldInfo) -> str:
    words = {Ge: "from", Gt: "above", Le: "to"}
    bounds = [
        f"{word} {bound_text(getattr(limit, kind.__name__.lower()))}"
        for kind, word in words.items()
        for limit in field.metadata
        if isinstance(limit, kind)
    ]
    return " ".join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), [each for each in get_args(annotation) if each not in (NoneType, ...)]
    if origin is Literal:
        return "one of " + ", ".join(f"`{_toml(each)}`" for each in arguments)
    if origin in (UnionType, Union, Annotated):
        return _type_name(arguments[0])
    if origin is tuple:
        return "list of tables" if arguments[0] is WebhookConfig else "list of strings"
    if origin is dict:
        return "table of strings"
    return {bool: "boolean", int: "integer", float: "number", str: "string"}[annotation]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{name} = {_toml(each)}" for name, each in value.items())
        return f"{{{inner}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
