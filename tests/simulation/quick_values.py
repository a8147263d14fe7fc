"""Frozen dataclasses for many small steps: made and changed as by dataclasses in a fraction of the time, unchecked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")
write, new = object.__setattr__, object.__new__


def quick_replace(value: T, /, **changes: Any) -> T:
    changed = new(type(value))
    write(changed, "__dict__", value.__dict__ | changes)
    return changed


@cache
def quick_init(kind: type) -> Callable[..., None]:
    """In place of its __init__."""
    assert not hasattr(kind, "__post_init__") and "__slots__" not in kind.__dict__
    parameters, written = ["made"], []
    scope: dict[str, Any] = {"write": write, "missing": MISSING}
    for field in fields(kind):
        name, default = field.name, f"default_{field.name}"
        has_factory = field.default_factory is not MISSING
        scope[default] = field.default_factory if has_factory else field.default
        bare = field.default is MISSING and not has_factory
        parameters.append(name if bare else f"{name}={'missing' if has_factory else default}")
        written.append(f"{name!r}: " + (f"{default}() if {name} is missing else {name}" if has_factory else name))
    exec(f"def init({', '.join(parameters)}):\n write(made, '__dict__', {{{', '.join(written)}}})", scope)
    init: Callable[..., None] = scope["init"]
    return init


M = TypeVar("M", bound=BaseModel)


def quick_copy(model: M, *, update: dict[str, Any]) -> M:
    """In place of BaseModel.model_copy."""
    changed = new(type(model))
    values = model.__dict__ | update
    write(changed, "__dict__", values)
    write(changed, "__pydantic_fields_set__", set(values))
    write(changed, "__pydantic_extra__", None)
    write(changed, "__pydantic_private__", None)
    return changed
