"""Frozen dataclasses for many small steps: made and changed as by dataclasses in a fraction of the time, unchecked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


def _function(kind: type, head: str, written: dict[str, str], ends: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A function that writes fields of `changed`, an object of `kind`, each as its expression gives it."""
    scope: dict[str, Any] = {"new": object.__new__, "kind": kind, "missing": MISSING}
    scope |= {f"default_{field.name}": _default(field) for field in fields(kind)}
    if "__slots__" in kind.__dict__:
        scope["writers"] = {name: kind.__dict__[name].__set__ for name in written}
        scope |= {f"write_{name}": write for name, write in scope["writers"].items()}
        lines = [f"write_{name}(changed, {value})" for name, value in written.items()]
    else:
        lines = ["held = changed.__dict__", *(f"held[{name!r}] = {value}" for name, value in written.items())]
    begins = [] if head.startswith("(changed") else ["changed = new(kind)"]
    exec("\n    ".join((f"def made{head}:", *begins, *lines, *ends)), scope)
    made: Callable[..., Any] = scope["made"]
    return made


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory


@cache
def _copier(kind: type) -> Callable[[Any, dict[str, Any]], Any]:
    new = object.__new__
    if "__slots__" in kind.__dict__:
        written = {field.name: f"value.{field.name}" for field in fields(kind)}
        changed = ("for name in changes:", "    writers[name](changed, changes[name])", "return changed")
        return _function(kind, "(value, changes)", written, changed)

    def copy(value: Any, changes: dict[str, Any]) -> Any:
        changed: Any = new(kind)
        held = changed.__dict__
        held.update(value.__dict__)
        held.update(changes)
        return changed

    return copy


def quick_replace(value: T, /, **changes: Any) -> T:
    kind: Any = type(value)
    changed: T = _copier(kind)(value, changes)
    return changed


@cache
def quick_init(kind: type) -> Callable[..., None]:
    """In place of its __init__."""
    assert not hasattr(kind, "__post_init__")
    parameters, written = ["changed"], {}
    for field in fields(kind):
        name, default = field.name, f"default_{field.name}"
        has_factory = field.default_factory is not MISSING
        bare = field.default is MISSING and not has_factory
        parameters.append(name if bare else f"{name}={'missing' if has_factory else default}")
        written[name] = f"{default}() if {name} is missing else {name}" if has_factory else name
    return _function(kind, f"({', '.join(parameters)})", written)


M = TypeVar("M", bound=BaseModel)


def quick_copy(model: M, *, update: dict[str, Any]) -> M:
    """In place of BaseModel.model_copy."""
    changed = object.__new__(type(model))
    values = {**model.__dict__, **update}
    write(changed, "__dict__", values)
    write(changed, "__pydantic_fields_set__", set(values))
    write(changed, "__pydantic_extra__", None)
    write(changed, "__pydantic_private__", None)
    return changed


write = object.__setattr__
