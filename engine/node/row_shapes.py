"""The shapes of rows in the field's data sets: by what each is recognised, and how a row becomes one that mlx-lm reads,
of messages with tools, or a text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine.protocol.jsonl import listed_keys, named_keys

_ROLE = ("role", "from", "speaker", "author")
_PARTS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "instruction", "question", "query", "problem", "user", "human", "input"),
    "completion": ("completion", "output", "response", "solution", "answer", "assistant", "bot", "target"),
    "chat": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns", "data"),
    "text": ("text", "content", "document", "body", "story", "code"),
    "chosen": ("chosen", "preferred_output"),
    "rejected": ("rejected", "non_preferred_output"),
    "system": ("system", "system_prompt", "system_message"),
    "input": ("input", "context"),
    "role": _ROLE,
    "content": ("content", "value", "text", "message"),
}
"""Part of a row or of a message → keys that data sets have for it, the likeliest first."""
_ANSWERS = (*_PARTS["completion"], *_PARTS["chosen"])
_NEEDED: dict[str, dict[str, str]] = {
    "preference": {"chosen": "an answer", "rejected": "a rejected answer"},
    "chat": {"chat": "messages"},
    "completions": {"prompt": "a prompt", "completion": "an answer"},
}
"""Shape → its parts, and what a row is without when one is null."""
_NO_OTHERS = {key for part in ("system", "input", "history", "tools", "functions") for key in _PARTS.get(part, (part,))}
_NO_OTHERS |= {key for needed in _NEEDED.values() for part in needed for key in _PARTS[part]}
"""Keys beside a null that are no texts of an unknown shape."""
_HALVES = {*_PARTS["prompt"], *_PARTS["completion"]}
"""Keys that are no text by themselves where the row has another one that may be their other half."""
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "instruction"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "chatgpt", "bing", "bard", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    "function_call": "function_call",
}
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking", "weight")
"""Keys of a message beside role and content that templates, or checks, read."""
_ABOUT_A_ROW = re.compile(
    r"(.*_)?(id|idx|index|url|link|title|source|meta|metadata|lang|language|date|timestamp|created|score|license|"
    r"category|subset|split|dataset|author|name|tags?|topic|hash)|unnamed.*|"
)
"""Columns without a text to train on."""
_TURNS = re.compile(r"\n\n(Human|Assistant): ?")
_EMPTY: tuple[object, ...] = (None, "", [], {})
Row = dict[str, Any]


class Skipped(Exception):
    """A row with nothing to train on: why."""


class _Parts:
    """The parts of a row or of a message by their names, wherever they are in it."""

    def __init__(self, row: Row, columns: Mapping[str, str]) -> None:
        self.row = row
        self.columns = columns
        self.read = set[str]()
        """Keys that were asked for and are there."""
        self.unread = set[str]()
        """Keys of messages."""

    def keys(self, part: str) -> tuple[str, ...]:
        return (self.columns[part],) if part in self.columns else _PARTS.get(part, (part,))

    def key(self, part: str) -> str | None:
        """One with a value, if there is any."""
        # An `input` may be the prompt itself.
        there = [
            key
            for key in self.keys(part)
            if self.row.get(key) is not None and not (part == "input" and key in self.read)
        ]
        return next((key for key in there if self.row[key] not in _EMPTY), next(iter(there), None))

    def nulls(self, part: str) -> set[str]:
        return {key for key in self.keys(part) if key in self.row and self.row[key] is None}

    def get(self, part: str) -> Any:
        key = self.key(part)
        if key is None:
            return None
        self.read.add(key)
        return self.row[key]

    def has(self, *names: str) -> bool:
        """All of these parts; none counts as read."""
        return all(self.key(name) is not None for name in names)

    def string(self, part: str) -> str:
        """Raises ValueError for what is no text; "" is none."""
        value = self.get(part)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"has as its {part} no text, but {json.dumps(value, default=str)[:60]}")
        return value or ""


def convert(
    row: Row, shape: str, columns: Mapping[str, str], before: Collection[str] = ()
) -> tuple[str, Row, set[str]]:
    """The shape's name, the row with `messages` (and `tools`) or `text`, and the keys that are not read. `shape`: one
    of FORMATS. `columns`: part → key. `before`: names of the shapes of earlier rows. Raises ValueError for a row that
    is none, and Skipped."""
    if all(value in _EMPTY for value in row.values()):
        raise Skipped("empty")
    for part, key in columns.items():
        if key not in row and part not in ("role", "content", "system", "input"):
            raise ValueError(f"has no {key}, which is to be its {part}: {listed_keys(row)}")
    parts = _Parts(row, columns)
    if isinstance(row.get("input"), dict) and "messages" in row["input"]:
        # OpenAI's file of preferences.
        parts = _Parts({**row, **row["input"]}, columns)
        parts.read.add("input")
    if shape == "auto":
        shape = next((shape for part, shape in _BY_COLUMN.items() if part in columns), shape)
    for name in _TRIED[shape]:
        converted = _SHAPES[name](parts)
        if converted is not None:
            unread = {key for key, value in row.items() if value not in _EMPTY} - parts.read
            return _name_of(name, parts), converted, unread | parts.unread
    had = {_GENERAL.get(name, name) for name in before}
    if lacking := next(filter(None, (_null_part(name, parts, had=name in had) for name in _TRIED[shape])), None):
        raise Skipped(f"without {lacking}")
    strings = [key for key, value in row.items() if isinstance(value, str)]
    dialogues = [
        key for key, value in row.items() if isinstance(value, list) and any(type(one) is dict for one in value)
    ]
    if not strings and not dialogues:
        raise ValueError(f"has no key whose value is a text, among {named_keys(row)}")
    prompt, completion, *_ = *strings, "KEY", "KEY"
    example = f'messages = "{dialogues[0]}"' if dialogues else f'prompt = "{prompt}", completion = "{completion}"'
    raise ValueError(
        f"has {'a shape that is not known' if shape == 'auto' else f'no {shape}'}: {listed_keys(row)}; "
        f"say what they are, for example [data] columns = {{ {example} }}"
    )


def _null_part(shape: str, parts: _Parts, *, had: bool) -> str | None:
    """A part that a row of this shape has as null, as columnar files, and tables made into JSON, have empty cells: it
    is named, or has its usual key, or no other value may be it, or an earlier row `had` this shape."""
    others = not had and any(
        isinstance(value, (str, list, dict)) and value and not _ABOUT_A_ROW.fullmatch(key.lower())
        for key, value in parts.row.items()
        if key not in _NO_OTHERS and key not in parts.columns.values()
    )
    for part in _nulls(shape, parts):
        if not others or parts.columns.get(part, _PARTS[part][0]) in parts.nulls(part):
            return _NEEDED[shape][part]
    return None


def _nulls(shape: str, parts: _Parts) -> list[str]:
    """The parts of a shape that are null, where all of them are there."""
    nulls = [part for part in _NEEDED.get(shape, ()) if parts.key(part) is None]
    return nulls if all(map(parts.nulls, nulls)) else []


_GENERAL = {"Alpaca": "completions", "ShareGPT": "chat"}
"""A shape's name as it is told → the one that it is tried as."""


def _name_of(shape: str, parts: _Parts) -> str:
    if {"instruction", "output"} <= parts.read:
        return "Alpaca"
    return "ShareGPT" if shape == "chat" and "from" in parts.read else shape


def _preference(parts: _Parts) -> Row | None:
    if not parts.has("chosen", "rejected"):
        return None
    parts.get("rejected")
    chosen: Any = parts.get("chosen")
    turns = _TURNS.split(chosen) if isinstance(chosen, str) else []
    if len(turns) > 2 and not parts.has("prompt") and not parts.has("chat"):
        # As Anthropic's hh-rlhf has them.
        pairs = zip(turns[1::2], turns[2::2])  # noqa: B905
        return _dialogue([{"role": role.lower(), "content": content.strip()} for role, content in pairs], parts)
    answer = _messages(chosen) or [chosen if isinstance(chosen, dict) else {"role": "assistant", "content": chosen}]
    if _Parts(answer[0], parts.columns).get("role") in ("system", "user", "human"):
        parts.get("prompt")
        return _dialogue(answer, parts)
    return _dialogue([*_asked(parts), *answer], parts)


def _asked(parts: _Parts) -> list[Any]:
    """The messages that are answered. Raises ValueError, Skipped."""
    messages = _messages(parts.get("chat")) or _messages(parts.get("prompt"))
    if messages:
        return messages
    text = "\n\n".join(filter(None, (parts.string("prompt"), parts.string("input"))))
    if not text.strip():
        raise Skipped("without a prompt")
    turns = [*itertools.chain.from_iterable(_parsed(parts.get("history")) or []), text]
    return _alternating(turns)


def _alternating(texts: list[Any]) -> list[Any]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts)]  # noqa: B905


def _chat(parts: _Parts) -> Row | None:
    messages: Any = _parsed(parts.get("chat"))
    if not isinstance(messages, list):
        return None
    if all(isinstance(message, str) for message in messages):
        messages = _alternating(messages)
    elif all(isinstance(message, dict) and {"human", "assistant"} <= {*message} for message in messages):
        messages = _alternating([text for message in messages for text in (message["human"], message["assistant"])])
    return _dialogue(messages, parts)


def _completions(parts: _Parts) -> Row | None:
    if not parts.has("prompt", "completion"):
        return None
    if str(parts.get("label")).lower() == "false":
        raise Skipped("labelled as an undesirable answer")
    answer = parts.get("completion")
    if not (messages := _messages(answer)):
        if not parts.string("completion").strip():
            raise Skipped("without an answer")
        messages = [{"role": "assistant", "content": answer}]
    return _dialogue([*_asked(parts), *messages], parts)


def _text(parts: _Parts) -> Row | None:
    key, nulls = parts.columns.get("text", "text"), parts.nulls("text")
    named = [part for part in parts.columns if any(part in needed for needed in _NEEDED.values())]
    if (key not in nulls or named) and not isinstance(parts.row.get(key), str):
        strings = [name for name, value in parts.row.items() if isinstance(value, str) or name in nulls]
        # What a row of another shape has beside its nulls is none either.
        if "text" in parts.columns or any(map(parts.nulls, named)) or any(_nulls(shape, parts) for shape in _NEEDED):
            strings = []
        texts = [name for name in strings if not _ABOUT_A_ROW.fullmatch(name.lower())]
        # Of an object without a text the title, or the id, is none either.
        key = next(iter(texts or strings if len(parts.row) == 1 else texts if len(texts) == 1 else []), "")
        others = [name.lower() for name, value in parts.row.items() if name != key and value not in _EMPTY]
        other_half = _ANSWERS if key in _PARTS["prompt"] else _PARTS["prompt"]
        others += [name for name in other_half if name in parts.row]
        if key in _HALVES and any(name == "source" or not _ABOUT_A_ROW.fullmatch(name) for name in others):
            return None
    if not key:
        return None
    parts.read.add(key)
    if not (parts.row[key] or "").strip():
        raise Skipped("without text")
    return {"text": parts.row[key]}


_SHAPES: dict[str, Callable[[_Parts], Row | None]] = {
    "preference": _preference,
    "chat": _chat,
    "completions": _completions,
    "text": _text,
}
"""In the order in which they are tried; None: a row is of another shape."""
_BY_COLUMN = {"chosen": "preference", "chat": "chat", "completion": "completions", "text": "text"}
"""A part that is named → the shape that has it."""
_TRIED = {"auto": (*_SHAPES,), "sharegpt": ("chat",), "alpaca": ("completions",), **{name: (name,) for name in _SHAPES}}


def _dialogue(messages: list[Any], parts: _Parts) -> Row:
    """Raises ValueError, Skipped."""
    converted = [_message(message, parts, number) for number, message in enumerate(messages, 1)]
    system = parts.string("system")
    if system.strip() and not (converted and converted[0]["role"] == "system"):
        converted.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "assistant" for message in converted):
        raise Skipped("without an assistant's message")
    tools = _parsed(parts.get("tools"))
    if tools is None and (functions := _parsed(parts.get("functions"))):
        tools = [{"type": "function", "function": function} for function in functions]
    return {"messages": converted, **({"tools": _without_nulls(tools)} if tools else {})}


def _message(message: Any, parts: _Parts, number: int) -> Row:
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is no object with a role and content")
    of_message = _Parts(message, {part: key for part, key in parts.columns.items() if part in ("role", "content")})
    role, content = of_message.get("role"), of_message.get("content")
    parts.read |= of_message.read & {"from"}
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise ValueError(f"message {number} has {f'the role {role[:40]!r}' if isinstance(role, str) else 'no role'}")
    role = _ROLES[role.lower()]
    # Templates also ask whether there is such a key: an empty list is no call.
    kept = {key: _without_nulls(message[key]) for key in _KEPT if message.get(key) not in _EMPTY}
    read = {*of_message.read, *_KEPT, "function_call"}
    parts.unread |= {f"{key} of messages" for key, value in message.items() if value not in _EMPTY and key not in read}
    if isinstance(content, list):
        if any(not isinstance(piece, dict) or piece.get("type") != "text" for piece in content):
            raise ValueError(f"message {number} holds more than text")
        content = "\n".join(str(piece["text"]) for piece in content)
    call = _without_nulls(_parsed(content if role == "function_call" else message.get("function_call")))
    empty = call in _EMPTY or (isinstance(call, dict) and all(value in _EMPTY for value in call.values()))
    if role == "function_call" or not empty:
        if not isinstance(call, dict) or not call.get("name"):
            raise ValueError(f"message {number} calls a function without a name")
        text = content if isinstance(content, str) and role != "function_call" else ""
        return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": call}], **kept}
    if not isinstance(content, str) and not kept.get("tool_calls"):
        raise ValueError(f"message {number} has no content")
    return {"role": role, "content": content or "", **kept}


def _messages(value: Any) -> list[Row] | None:
    """Messages, perhaps as the JSON of a cell; a text that is JSON of something else is a text."""
    value = _parsed(value)
    whole = isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    return value if whole and not {*_ROLE}.isdisjoint(value[0]) else None


def _parsed(value: Any) -> Any:
    """A value that a cell may hold as JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _without_nulls(value: Any) -> Any:
    """Columnar files have each key in each struct."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
