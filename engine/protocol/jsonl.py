"""JSON lines as mlx-lm reads them (tuner/datasets.py): their ends, the rows in them, and a row's form and tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

BLANK = b"\xef\xbb\xbf \t\r\n\v\f"
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_NAMED_KEYS = 6
NOT_UTF8 = "is not UTF-8"
_THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
)
"""A vocabulary with one of these pairs makes mlx-lm render chats with enable_thinking."""


def lines(file: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a binary file with their ends, which are LF, CR LF or CR alone, as in Python's text files."""
    for line in file:
        yield from line.splitlines(keepends=True)


def is_blank(line: bytes) -> bool:
    return not line.strip(BLANK)


def parse(line: bytes) -> dict[str, Any]:
    """The row in a line, which may begin with a byte order mark. Raises ValueError: "is no JSON: …"."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(NOT_UTF8) from None
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    return row


def form_of(row: dict[str, Any], keys: Mapping[str, str]) -> str | None:
    """mlx-lm's own order of recognition; None is no form it reads. `keys`: prompt, completion, chat, text → the key of
    a row."""
    if keys["prompt"] in row and keys["completion"] in row:
        return "completions"
    return next((form for form in ("chat", "text") if keys[form] in row), None)


def content_of(row: dict[str, Any], form: str | None, keys: Mapping[str, str]) -> Any:
    """A row's text, or its messages; a prompt and its completion are two."""
    if form != "completions":
        return row[keys["chat" if form == "chat" else "text"]]
    roles = (("user", "prompt"), ("assistant", "completion"))
    return [{"role": role, "content": row[keys[part]]} for role, part in roles]


def row_tokeniser(
    tokenizer: Any, keys: Mapping[str, str], *, mask_prompt: bool
) -> Callable[[dict[str, Any], str | None], tuple[list[int], int]]:
    """The tokens of a row, given its form, and the index of the first target, by a tokenizer of transformers: the same
    as mlx-lm's by its own."""
    vocabulary = tokenizer.get_vocab()
    thinking = any(begin in vocabulary and end in vocabulary for begin, end in _THINKING)

    def tokenise(row: dict[str, Any], form: str | None) -> tuple[list[int], int]:
        content = content_of(row, form, keys)
        if form == "text":
            tokens, end = tokenizer.encode(content), [tokenizer.eos_token_id]
            return tokens if tokens[-1:] == end else tokens + end, 0
        options = {"tools": row.get("tools"), "return_dict": False, "enable_thinking": thinking}
        tokens = tokenizer.apply_chat_template(content, **options)
        if not mask_prompt:
            return tokens, 0
        asks = content[-1].get("role") == "assistant"
        return tokens, len(tokenizer.apply_chat_template(content[:-1], add_generation_prompt=asks, **options))

    return tokenise


def fault_of(row: dict[str, Any], form: str | None, keys: Mapping[str, str]) -> str | None:
    """Why mlx-lm would fail on a row, given the form of the file's first one."""
    if form is None:
        wanted = f"{keys['text']}, {keys['prompt']} + {keys['completion']}, {keys['chat']}"
        return f"has none of {wanted}: {listed_keys(row)}; say what they are in [data] columns"
    if form == "chat":
        messages = row.get(keys["chat"])
        if not isinstance(messages, list) or not messages:
            return f"{keys['chat']} is no list of messages"
        whole = all(isinstance(message, dict) and "role" in message for message in messages)
        return None if whole else f"a message in {keys['chat']} has no role"
    for key in [keys["text"]] if form == "text" else [keys["prompt"], keys["completion"]]:
        if key not in row:
            return f"has no {key}, as the first line has"
        if not isinstance(row[key], str) or (form == "text" and not row[key]):
            return f"{key} is {'empty' if row[key] == '' else 'no text'}"
    return None


def half_pair(values: object, line: bytes | None = None) -> str | None:
    """Why no tokenizer takes these values: half of a surrogate pair. `line`: theirs, for a look at that first."""
    if line is not None and not _ESCAPED_HALF.search(line):
        return None
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        return f"has half of a surrogate pair ({half}), which is no character: remove it"
    return None


def listed_keys(row: Mapping[str, Any]) -> str:
    return f"it has {named_keys(row)}"


def named_keys(row: Mapping[str, Any]) -> str:
    shown = [json.dumps(str(key)[:40])[1:-1] for key in list(row)[:_NAMED_KEYS]]
    return f"{', '.join(shown) or 'no key'}{', …' if len(row) > _NAMED_KEYS else ''}"
