"""dataclasses.replace for many small steps: the same result in a fraction of the time, its arguments not checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _copier(kind: type) -> Callable[[Any, dict[str, Any]], Any]:
    new = object.__new__
    if "__slots__" not in kind.__dict__:

        def copy(value: Any, changes: dict[str, Any]) -> Any:
            changed: Any = new(kind)
            changed.__dict__.update(value.__dict__)
            changed.__dict__.update(changes)
            return changed

        return copy
    writers = {field.name: kind.__dict__[field.name].__set__ for field in fields(kind)}
    lines = [f"    write_{name}(changed, value.{name})" for name in writers]
    source = "\n".join(("def copy_slots(value, changes):", "    changed = new(kind)", *lines, *_CHANGED))
    scope: dict[str, Any] = {"new": new, "kind": kind, "writers": writers}
    scope |= {f"write_{name}": write for name, write in writers.items()}
    exec(source, scope)
    made: Callable[[Any, dict[str, Any]], Any] = scope["copy_slots"]
    return made


_CHANGED = (
    "    for name, held in changes.items():",
    "        writers[name](changed, held)",
    "    return changed",
)


def quick_replace(value: T, /, **changes: Any) -> T:
    kind: Any = type(value)
    changed: T = _copier(kind)(value, changes)
    return changed
