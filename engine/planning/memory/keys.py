"""Numbers and words of a model's config.json, which is anybody's file: each is checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import InputError
from engine.security.sanitise import plain

_LARGEST = 2**24
"""Of any single size: the largest vocabularies and projections are 2^19."""


class Keys:
    """One table of a config.json. Every reader raises InputError that names the key."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set, a whole number from 0 to 2^24."""
        for name in names:
            value = self._table.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
                raise refused(f"{name} = {plain(repr(value))[:60]} is not a size")
            return value
        if default is None:
            raise refused(f"{names[0]} is missing")
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        """As `whole`, at least 1."""
        value = self.whole(*names, default=default)
        if value < 1:
            raise refused(f"{names[0]} = {value}: must be at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._table.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
            raise refused(f"{name} = {plain(repr(value))[:60]} is not a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._table.get(name)
        return default if value is None else bool(value)

    def word(self, name: str) -> str | None:
        value = self._table.get(name)
        return value if isinstance(value, str) else None

    def whole_list(self, name: str) -> list[int] | None:
        """A list of whole numbers; None when it is not set."""
        value = self._table.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, int) for entry in value):
            raise refused(f"{name} is not a list of whole numbers")
        return [int(entry) for entry in value]

    def words(self, name: str, layers: int) -> list[str] | None:
        """A list with one word for each of `layers`; None when it is not set."""
        value = self._table.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise refused(f"{name} is not a list of words")
        if len(value) != layers:
            raise refused(f"{name} names {len(value)} layers of {layers}")
        return [str(entry) for entry in value]

    def table(self, name: str) -> Mapping[str, Any]:
        """A table inside this one; {} when it is not set."""
        value = self._table.get(name)
        return value if isinstance(value, Mapping) else {}

    def heads(self) -> tuple[int, int]:
        """Attention heads, and those of keys and values."""
        heads = self.size("num_attention_heads")
        return heads, self.size("num_key_value_heads", default=heads)


def refused(why: str) -> InputError:
    return InputError(
        "the memory cannot be estimated", where="config.json", why=why, todo="use a model that mlx-lm can load"
    )
