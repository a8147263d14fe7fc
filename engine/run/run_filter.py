"""The filter language of the list of runs, `state:failed lr<1e-4 tag:night`, and its order by a field. Pure.

Terms side by side must all hold; `or`, `not` (or a leading `-`) and parentheses combine them. `field:text` is
contained, `=` is equal, `<` and the like compare figures, and `field:*` has any value. A free word is looked for in
name, id, cause and tags. What a run does not have, no term matches."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from engine.errors import InputError, did_you_mean
from engine.models import RunRecord
from engine.security.identifiers import safe_repr

RunTest = Callable[[RunRecord], bool]
Value = str | float | Sequence[str] | None


@dataclass(frozen=True)
class RunField:
    """A property by which runs are filtered and ordered."""

    kind: Literal["text", "number", "seconds", "moment"]
    value: Callable[[RunRecord, datetime], Value]
    """Texts; figures; seconds; seconds since the epoch. None where the run has none."""


def _text(name: str) -> RunField:
    return RunField("text", lambda run, _: getattr(run, name))


def _number(name: str) -> RunField:
    return RunField("number", lambda run, _: getattr(run, name))


def _setting(name: str, kind: Literal["text", "number"]) -> RunField:
    def value(run: RunRecord, _: datetime) -> Value:
        setting = run.settings.get(name)
        if kind == "text" or setting is None:
            return None if setting is None else str(setting)
        return float(setting) if isinstance(setting, int | float) else None

    return RunField(kind, value)


def _took(run: RunRecord, now: datetime) -> float:
    return ((run.ended_at or now) - run.created_at).total_seconds()


FIELDS: Final[Mapping[str, RunField]] = {
    **{name: _text(name) for name in ("id", "name", "state", "reason", "cause", "host", "task", "source", "outcome")},
    **{name: _text(name) for name in ("note", "backend", "cluster")},
    "tag": RunField("text", lambda run, _: run.tags),
    **{name: _setting(name, "text") for name in ("model", "data", "strategy", "framework", "optimizer", "command")},
    "type": _setting("fine_tune_type", "text"),
    "lr": _setting("learning_rate", "number"),
    "batch": _setting("batch_size", "number"),
    "layers": _setting("num_layers", "number"),
    "length": _setting("max_seq_length", "number"),
    "seed": _setting("seed", "number"),
    "step": _number("iteration"),
    "steps": _number("iterations"),
    "loss": _number("train_loss"),
    "val": _number("val_loss"),
    "test": _number("test_loss"),
    "speed": _number("tokens_per_second"),
    "ranks": _number("world_size"),
    "rank": _number("rank"),
    "attempts": _number("attempts"),
    "took": RunField("seconds", _took),
    "age": RunField("seconds", lambda run, now: (now - run.created_at).total_seconds()),
    "started": RunField("moment", lambda run, _: run.created_at.timestamp()),
}

_COMPARED: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    # 1e-4 and what JSON makes of it are the same.
    ":": lambda value, wanted: math.isclose(value, wanted, rel_tol=1e-9),
    "=": lambda value, wanted: math.isclose(value, wanted, rel_tol=1e-9),
    "!=": lambda value, wanted: not math.isclose(value, wanted, rel_tol=1e-9),
}
_TOKEN = re.compile(r"""\s*(?:(?P<mark>[()]|[-!](?=[^\s=]))|(?P<word>(?:"[^"]*"|[^\s()"])+))""")
_TERM = re.compile(r"(?P<field>[A-Za-z_]+)(?P<sign><=|>=|!=|[:=<>])(?P<value>.*)", re.DOTALL)
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DEEPEST: Final = 50
_LENGTH = re.compile(r"(?P<count>\d+(?:\.\d+)?)(?P<unit>[a-z]*)")


def run_filter(text: str, now: datetime) -> RunTest:
    """The test of a filter; an empty one takes all runs. Raises InputError, with its first fault in one line."""
    return _Parser(text, now).parse()


def sorted_runs(runs: Iterable[RunRecord], field: str, now: datetime) -> list[RunRecord]:
    """The runs in ascending order of a field, with a leading `-` in descending; those without a value last. Raises
    InputError."""
    value, descending = _field(field.removeprefix("-")).value, field.startswith("-")
    valued, others = list[tuple[Any, RunRecord]](), list[RunRecord]()
    for run in runs:
        key = value(run, now)
        key = ", ".join(key) if isinstance(key, Sequence) and not isinstance(key, str) else key
        if key is None or key == "":
            others.append(run)
        else:
            valued.append((key.casefold() if isinstance(key, str) else key, run))
    return [run for _, run in sorted(valued, key=operator.itemgetter(0), reverse=descending)] + others


def _fault(why: str, todo: str = "") -> InputError:
    return InputError("the filter cannot be read", why=why, todo=todo)


def _field(name: str) -> RunField:
    if (field := FIELDS.get(name.lower())) is not None:
        return field
    todo = did_you_mean(name.lower(), FIELDS) or f"there are {', '.join(sorted(FIELDS))}"
    raise InputError(f"runs have no {safe_repr(name, 40)}", todo=todo)


class _Parser:
    """any = all {"or" all}; all = one {["and"] one}; one = ("not" | "-" | "!") one | "(" any ")" | term"""

    def __init__(self, text: str, now: datetime) -> None:
        self._now = now
        self._tokens = list(_tokens(text))
        self._next = self._depth = 0

    def parse(self) -> RunTest:
        if not self._tokens:
            return lambda run: True
        test = self._any()
        if self._next < len(self._tokens):
            raise _fault("a ) has no (")
        return test

    def _peek(self) -> tuple[str, bool]:
        """The next token, and that it is a mark; a word that combines terms counts as one. "" at the end."""
        if self._next == len(self._tokens):
            return "", True
        token, mark = self._tokens[self._next]
        return (token.lower(), True) if not mark and token.lower() in ("or", "and", "not") else (token, mark)

    def _take(self, *marks: str) -> bool:
        token, mark = self._peek()
        taken = mark and token in marks
        self._next += taken
        return taken

    def _any(self) -> RunTest:
        tests = [self._all()]
        while self._take("or"):
            tests.append(self._all())
        return tests[0] if len(tests) == 1 else lambda run: any(test(run) for test in tests)

    def _all(self) -> RunTest:
        tests = [self._one()]
        while self._take("and") or self._peek() not in (("", True), (")", True), ("or", True)):
            tests.append(self._one())
        return tests[0] if len(tests) == 1 else lambda run: all(test(run) for test in tests)

    def _one(self) -> RunTest:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _fault("too much is nested")
        test = self._simple()
        self._depth -= 1
        return test

    def _simple(self) -> RunTest:
        if self._take("not", "-", "!"):
            negated = self._one()
            return lambda run: not negated(run)
        if self._take("("):
            test = self._any()
            if not self._take(")"):
                raise _fault("a ( is not closed")
            return test
        token, mark = self._peek()
        if mark:
            raise _fault(f"something is missing before {token!r}" if token else "something is missing at its end")
        self._next += 1
        return self._term(token)

    def _term(self, word: str) -> RunTest:
        if (term := _TERM.fullmatch(word)) is None:
            wanted = word.replace('"', "").casefold()
            return lambda run: any(wanted in text.casefold() for text in (run.name, run.id, run.cause or "", *run.tags))
        name, sign, text = term["field"].lower(), term["sign"], term["value"].replace('"', "")
        field, now = _field(name), self._now
        if text == "*" and sign in (":", "="):
            return lambda run: field.value(run, now) not in (None, "", [], ())
        if not text:
            raise _fault(f"{name}{sign} needs a value", f"{name}:* is any")
        return (
            _text_test(name, field, sign, text, now)
            if field.kind == "text"
            else _figure_test(name, field, sign, text, now)
        )


def _tokens(text: str) -> Iterator[tuple[str, bool]]:
    """Words, and marks (True)."""
    place, rest = 0, text.rstrip()
    while place < len(rest):
        if (token := _TOKEN.match(rest, place)) is None:
            raise _fault("a quote is not closed")
        place = token.end()
        yield (token["mark"], True) if token["mark"] else (token["word"], False)


def _text_test(name: str, field: RunField, sign: str, text: str, now: datetime) -> RunTest:
    if sign not in (":", "=", "!="):
        raise _fault(f"{name} is a text", f"{name}:{text} is contained, {name}={text} is equal")
    wanted = text.casefold()

    def test(run: RunRecord) -> bool:
        value = field.value(run, now)
        texts = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
        folded = [one.casefold() for one in texts]
        if sign == "!=":
            return wanted not in folded
        return any(wanted in one for one in folded) if sign == ":" else wanted in folded

    return test


def _figure_test(name: str, field: RunField, sign: str, text: str, now: datetime) -> RunTest:
    wanted, compare = _figure(name, field.kind, text), _COMPARED[sign]

    def test(run: RunRecord) -> bool:
        value = field.value(run, now)
        return isinstance(value, int | float) and compare(value, wanted)

    return test


def _figure(name: str, kind: str, text: str) -> float:
    """Raises InputError."""
    if kind == "moment":
        try:
            # A person writes local time.
            return datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            raise _fault(
                f"{name} is compared with a day or time", f"{name}>2026-11-27; age<7d is another way"
            ) from None
    if kind == "seconds":
        length = _LENGTH.fullmatch(text.lower())
        if length is None or length["unit"] not in _UNITS:
            raise _fault(f"{name} is compared with a time", f"{name}<90s, {name}>30min, {name}>2h, {name}<7d")
        return float(length["count"]) * _UNITS[length["unit"]]
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise _fault(f"{name} is compared with a number, not {safe_repr(text, 40)}", f"{name}<0.5") from None
