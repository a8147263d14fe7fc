"""Data in the shapes that people and other programs have it in: read right, or refused with the row and the reason."""

from __future__ import annotations

import bz2
import datetime
import gzip
import io
import json
import lzma
import os
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.node import standard_data as module
from engine.node.source_files import DataError
from engine.node.standard_data import StandardData, standard_data
from engine.protocol.attempt import open_regular

OPTIONS = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text", "max_seq_length": 2048}
TURNS = (("level?", "three zero"), ("heading?", "two seven zero"))
"""What each sample has as questions and answers."""
PAIRS = [[{"role": "user", "content": asked}, {"role": "assistant", "content": answer}] for asked, answer in TURNS]
TALK = [message for pair in PAIRS for message in pair]
SYSTEM = {"role": "system", "content": "You are a tower."}
CALL = {"type": "function", "function": {"name": "wind", "arguments": {"at": "27"}}}
TOOL = {"type": "function", "function": {"name": "wind", "parameters": {"type": "object"}}}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "wind?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "9 knots"},
    {"role": "assistant", "content": "9 knots."},
]
SHAREGPT = [{"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]} for turn in TALK]


@pytest.fixture(autouse=True)
def own_home(home: Path) -> Path:
    return home


def keyed(prompt: str, completion: str, **more: object) -> list[dict[str, object]]:
    return [{prompt: asked, completion: answer, **more} for asked, answer in TURNS]


def jsonl(rows: list[Any], **options: Any) -> bytes:
    return "".join(json.dumps(row, **options) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> Callable[[], bytes]:
    """Made when the test runs: pyarrow takes long to import."""

    def made() -> bytes:
        import pyarrow  # noqa: PLC0415
        from pyarrow import parquet as format  # noqa: PLC0415

        file = io.BytesIO()
        format.write_table(pyarrow.Table.from_pylist(rows), file)
        return file.getvalue()

    return made


def arrow(rows: list[dict[str, Any]], form: str = "stream") -> Callable[[], bytes]:
    def made() -> bytes:
        import pyarrow  # noqa: PLC0415

        file, table = io.BytesIO(), pyarrow.Table.from_pylist(rows)
        with getattr(pyarrow.ipc, f"new_{form}")(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=1)
        return file.getvalue()

    return made


def zipped(raw: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("train.jsonl", raw)
    return file.getvalue()


ALPACA = [{"instruction": asked, "input": "", "output": answer} for asked, answer in TURNS]
CSV = "id,question,answer\r\n1,level?,three zero\r\n2,heading?,two seven zero\r\n"
QUOTED = 'prompt,response\n"level,\nsay again ""please""",three zero\n,\nheading?,two seven zero\n'
QUOTED_PAIRS = [[{"role": "user", "content": 'level,\nsay again "please"'}, PAIRS[0][1]], PAIRS[1]]
RESPONSE: dict[str, Any] = {"role": "assistant", "content": "three zero"}
HH = "\n\nHuman: level?\n\nAssistant: three zero\n\nHuman: heading?\n\nAssistant: two seven zero"
TEXTS = [{"text": "tower, hold\n\nover"}, {"text": "raven, land"}]
MESSAGES = [{"messages": pair} for pair in PAIRS]
READ: dict[str, tuple[str, bytes | Callable[[], bytes], dict[str, Any], list[Any]]] = {
    "OpenAI chat": ("chat.jsonl", jsonl(MESSAGES), {}, PAIRS),
    "OpenAI chat with tools": ("t.jsonl", jsonl([{"messages": CALLING, "tools": [TOOL]}]), {}, [CALLING]),
    "tools as a text": ("t.jsonl", jsonl([{"messages": CALLING, "tools": json.dumps([TOOL])}]), {}, [CALLING]),
    "OpenAI functions": ("t.jsonl", jsonl([{"messages": CALLING, "functions": [TOOL["function"]]}]), {}, [CALLING]),
    "OpenAI content parts": (
        "p.jsonl",
        jsonl([{"messages": [{"role": "user", "content": [{"type": "text", "text": "level?"}]}, RESPONSE]}]),
        {},
        PAIRS[:1],
    ),
    "OpenAI preferences": (
        "p.jsonl",
        jsonl(
            [{"input": {"messages": PAIRS[0][:1]}, "preferred_output": [RESPONSE], "non_preferred_output": [RESPONSE]}]
        ),
        {},
        PAIRS[:1],
    ),
    "legacy OpenAI": ("prepared.jsonl", jsonl(keyed("prompt", "completion")), {}, PAIRS),
    "ShareGPT": ("sharegpt.json", json.dumps([{"id": "a", "conversations": SHAREGPT}] * 2).encode(), {}, [TALK] * 2),
    "ShareGPT with a system prompt": (
        "s.json",
        json.dumps([{"conversations": SHAREGPT, "system": SYSTEM["content"]}], indent=2).encode(),
        {},
        [[SYSTEM, *TALK]],
    ),
    "LLaMA-Factory function calls": (
        "s.json",
        json.dumps(
            [
                {
                    "conversations": [
                        {"from": "human", "value": "wind?"},
                        {"from": "function_call", "value": json.dumps(CALL["function"])},
                        {"from": "observation", "value": "9 knots"},
                        {"from": "gpt", "value": "9 knots."},
                    ],
                    "tools": json.dumps([TOOL]),
                }
            ]
        ).encode(),
        {},
        [CALLING],
    ),
    "a chat under other keys": (
        "c.jsonl",
        jsonl([{"thread": [{"who": "user", "said": "level?"}, {"who": "bot", "said": "three zero"}]}]),
        {"columns": {"messages": "thread", "role": "who", "content": "said"}},
        PAIRS[:1],
    ),
    "UltraChat": ("u.jsonl", jsonl([{"id": "0", "data": [text for turn in TURNS for text in turn]}]), {}, [TALK]),
    "turns of human and assistant": (
        "m.jsonl",
        jsonl([{"conversation": [{"human": asked, "assistant": answer} for asked, answer in TURNS]}]),
        {},
        [TALK],
    ),
    "Alpaca": ("alpaca_data.json", json.dumps(ALPACA, indent=4).encode(), {}, PAIRS),
    "Alpaca with input, system and history": (
        "alpaca.json",
        json.dumps(
            [
                {
                    "instruction": "Answer.",
                    "input": "heading?",
                    "output": "two seven zero",
                    "system": SYSTEM["content"],
                    "history": [["level?", "three zero"]],
                }
            ]
        ).encode(),
        {},
        [[SYSTEM, *PAIRS[0], {"role": "user", "content": "Answer.\n\nheading?"}, PAIRS[1][1]]],
    ),
    "Dolly": ("dolly.jsonl", jsonl(keyed("instruction", "response", context="", category="open_qa")), {}, PAIRS),
    "OpenOrca": (
        "orca.jsonl",
        jsonl(keyed("question", "response", id="cot.1", system_prompt="")),
        {"format": "completions"},
        PAIRS,
    ),
    "MetaMath": (
        "m.json",
        json.dumps(keyed("query", "response", type="GSM", original_question="x")).encode(),
        {},
        PAIRS,
    ),
    "pairs under other keys": (
        "q.jsonl",
        jsonl(keyed("Q", "A", url="x")),
        {"columns": {"prompt": "Q", "completion": "A"}},
        PAIRS,
    ),
    "TRL conversational": (
        "t.jsonl",
        jsonl([{"prompt": pair[:1], "completion": pair[1:]} for pair in PAIRS]),
        {},
        PAIRS,
    ),
    "preferences": (
        "dpo.jsonl",
        jsonl([{"prompt": "level?", "chosen": "three zero", "rejected": "no"}]),
        {},
        PAIRS[:1],
    ),
    "UltraFeedback": (
        "dpo.jsonl",
        jsonl([{"prompt": "level?", "chosen": PAIRS[0], "rejected": PAIRS[1], "score_chosen": 8.0}]),
        {},
        PAIRS[:1],
    ),
    "LLaMA-Factory ranking": (
        "rank.json",
        json.dumps(
            [{"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "no"}}]
        ).encode(),
        {},
        PAIRS[:1],
    ),
    "hh-rlhf": ("hh.jsonl", jsonl([{"chosen": HH, "rejected": "\n\nHuman: level?\n\nAssistant: no"}]), {}, [TALK]),
    "KTO": (
        "kto.jsonl",
        jsonl([{**row, "label": number == 0} for number, row in enumerate(keyed("prompt", "completion"))]),
        {},
        PAIRS[:1],
    ),
    "CSV": ("qa.csv", CSV.encode(), {}, PAIRS),
    "CSV of Excel": ("qa.csv", CSV.replace(",", ";").encode("utf-8-sig"), {}, PAIRS),
    "CSV with quoted line breaks and an empty row": ("qa.csv", QUOTED.encode(), {}, QUOTED_PAIRS),
    "CSV in UTF-16": ("qa.csv", CSV.replace(",", "\t").encode("utf-16"), {}, PAIRS),
    "CSV of messages": (
        "chat.csv",
        'messages\n"{}"\n'.format(json.dumps(TALK).replace('"', '""')).encode(),
        {},
        [TALK],
    ),
    "TSV": ("qa.tsv", CSV.replace(",", "\t").encode(), {}, PAIRS),
    "CSV of one column": (
        "lines.csv",
        b'quote\n"tower, hold\n\nover"\nraven, land\n'.replace(b"raven, land", b'"raven, land"'),
        {},
        TEXTS,
    ),
    "Parquet": ("train-00000-of-00001.parquet", parquet([{**row, "id": 1} for row in ALPACA]), {}, PAIRS),
    "Parquet of messages": (
        "train.parquet",
        parquet([{"messages": CALLING[:1] + CALLING[2:]}]),
        {},
        [CALLING[:1] + CALLING[2:]],
    ),
    "Parquet of one column": ("p.parquet", parquet([{"content": row["text"]} for row in TEXTS]), {}, TEXTS),
    "Arrow of save_to_disk": ("data-00000-of-00001.arrow", arrow(keyed("question", "answer")), {}, PAIRS),
    "Arrow with a footer (Feather)": ("data.arrow", arrow(keyed("question", "answer"), "file"), {}, PAIRS),
    "Arrow, compressed": (
        "data.arrow.gz",
        lambda: gzip.compress(arrow(keyed("question", "answer"))()),
        {},
        PAIRS,
    ),
    "Parquet that is called Arrow": ("data.arrow", parquet(keyed("question", "answer")), {}, PAIRS),
    "Feather": ("data.feather", arrow(keyed("question", "answer"), "file"), {}, PAIRS),
    "JSON with its rows in data": (
        "s.json",
        json.dumps({"version": "1.0", "data": keyed("question", "answer"), "count": 2}, indent=1).encode(),
        {},
        PAIRS,
    ),
    "JSON of the Hub's dataset viewer": (
        "rows.json",
        json.dumps({"rows": [{"row_idx": 0, "row": row} for row in keyed("question", "answer")]}).encode(),
        {},
        PAIRS,
    ),
    "objects over several lines": (
        "o.json",
        "\n".join(json.dumps(row, indent=2) for row in keyed("question", "answer")).encode("utf-8-sig"),
        {},
        PAIRS,
    ),
    "gzip": ("a.jsonl.gz", gzip.compress(jsonl(ALPACA)), {}, PAIRS),
    "bzip2": ("a.json.bz2", bz2.compress(json.dumps(ALPACA).encode()), {}, PAIRS),
    "xz of UTF-16": ("a.jsonl.xz", lzma.compress(jsonl(ALPACA).decode().encode("utf-16")), {}, PAIRS),
    "UTF-16 without a mark": ("a.jsonl", jsonl(ALPACA).decode().encode("utf-16-le"), {}, PAIRS),
    "mixed shapes": ("m.jsonl", jsonl([*ALPACA, {"conversations": SHAREGPT}]), {}, [*PAIRS, TALK]),
    "empty rows and blank lines": (
        "e.jsonl",
        b"\xef\xbb\xbf\r\n" + jsonl([{"instruction": "", "output": ""}, *ALPACA, {"instruction": "a", "output": " "}]),
        {},
        PAIRS,
    ),
    "pairs of which a half is null": (
        "p.parquet",
        parquet(
            [
                {"question": None, "answer": "a", "id": None},
                *keyed("question", "answer", id="b"),
                {"question": None, "answer": None, "id": "c"},
                {"question": "a", "answer": None, "id": "d"},
            ]
        ),
        {},
        PAIRS,
    ),
    "preferences of which some are null": (
        "p.jsonl",
        jsonl(
            [
                {"prompt": "a", "chosen": None, "rejected": None},
                {"prompt": "level?", "chosen": "three zero", "rejected": "no"},
            ]
        ),
        {},
        PAIRS[:1],
    ),
    "messages and facts, of which some are null": (
        "m.jsonl",
        jsonl([{"id": "a", "messages": None}, {"id": 1, "messages": None}, *({"id": "b", **row} for row in MESSAGES)]),
        {},
        PAIRS,
    ),
    "a named text that is null beside another": (
        "t.jsonl",
        jsonl([{"summary": "s", "essay": None}, *({"summary": "s", "essay": row["text"]} for row in TEXTS)]),
        {"columns": {"text": "essay"}},
        TEXTS,
    ),
    "texts, of which some are null beside another text": (
        "t.jsonl",
        jsonl([{"text": None, "summary": "only"}, *({"summary": "s", **row} for row in TEXTS)]),
        {},
        TEXTS,
    ),
    "the only texts, of which some are null": (
        "t.jsonl",
        jsonl([{"title": "t", "body": None}, *({"title": "t", "body": row["text"]} for row in TEXTS)]),
        {},
        TEXTS,
    ),
    "messages, of which some are null beside their prompt": (
        "u.jsonl",
        jsonl([{"prompt": "p", "prompt_id": "a", "messages": pair} for pair in (None, *PAIRS)]),
        {},
        PAIRS,
    ),
    "pairs that are null beside another text": (
        "q.jsonl",
        jsonl([{"prompt": None, "completion": None, "note": "n"}, *keyed("prompt", "completion", note="n")]),
        {},
        PAIRS,
    ),
    "a single text with numbers that are null": (
        "t.jsonl",
        jsonl([{"essay": row["text"], "rating": None, "system": None, "input": None} for row in TEXTS]),
        {},
        TEXTS,
    ),
    "named pairs of which a half is null beside another text": (
        "q.jsonl",
        jsonl([{"Q": None, "A": "a", "note": "n"}, *keyed("Q", "A", note="n")]),
        {"columns": {"prompt": "Q", "completion": "A"}},
        PAIRS,
    ),
    "pairs in whose rows keys of other shapes are null": (
        "q.jsonl",
        jsonl(keyed("prompt", "completion", messages=None, text=None, chosen=None, rejected=None)),
        {},
        PAIRS,
    ),
    "texts with facts about them": (
        "wiki.jsonl",
        jsonl([{"id": str(n), "url": "http", "title": "t", "body": row["text"]} for n, row in enumerate(TEXTS)]),
        {},
        TEXTS,
    ),
    "NuminaMath": (
        "math.jsonl",
        jsonl([{**row, "answer": "0"} for row in keyed("problem", "solution", problem_type="Algebra")]),
        {},
        PAIRS,
    ),
    "an input with its context": (
        "q.jsonl",
        jsonl([{"input": "level?", "context": "at 27", "output": "three zero"}]),
        {},
        [[{"role": "user", "content": "level?\n\nat 27"}, RESPONSE]],
    ),
    "an empty key beside the filled one": (
        "q.jsonl",
        jsonl([{"prompt": "", "output": "", **row} for row in keyed("question", "answer")]),
        {},
        PAIRS,
    ),
    "OpenAI function_call": (
        "f.jsonl",
        jsonl(
            [
                {
                    "messages": [
                        {**CALLING[0], "function_call": {"name": None, "arguments": None}},
                        {"role": "assistant", "content": "", "function_call": CALL["function"]},
                        {"role": "function", "name": "wind", "content": "9 knots", "function_call": {}},
                        {**CALLING[3], "function_call": ""},
                    ]
                }
            ]
        ),
        {},
        [[*CALLING[:2], {**CALLING[2], "name": "wind"}, CALLING[3]]],
    ),
    "a function call with a text and no weight": (
        "f.jsonl",
        jsonl(
            [
                {
                    "messages": [
                        CALLING[0],
                        {"role": "assistant", "content": "Wait.", "weight": 0, "function_call": CALL["function"]},
                        RESPONSE,
                    ]
                }
            ]
        ),
        {},
        [[CALLING[0], {**CALLING[1], "content": "Wait.", "weight": 0}, RESPONSE]],
    ),
    "a question with facts about it": ("q.jsonl", jsonl([{"question": "tower?", "id": 7}]), {}, [{"text": "tower?"}]),
    "a text": ("notes.txt", b"tower, hold\r\n\r\nover\r\n", {}, TEXTS[:1]),
}


def rows_of(data: StandardData) -> list[dict[str, Any]]:
    """Of all splits, in the order of their messages."""
    files = sorted(data.folder.glob("*.jsonl"))
    return sorted((json.loads(line) for file in files for line in file.read_bytes().splitlines()), key=json.dumps)


@pytest.mark.parametrize("name", READ)
def test_data_in_a_known_shape_is_read(tmp_path: Path, name: str) -> None:
    file, raw, chosen, expected = READ[name]
    path = tmp_path / file
    path.write_bytes(raw if isinstance(raw, bytes) else raw())
    data = standard_data(path, {**OPTIONS, "data": {"valid": 0, **chosen}})
    rows = rows_of(data)
    got = [row if "text" in row else row["messages"] for row in rows]
    assert sorted(got, key=json.dumps) == sorted(expected, key=json.dumps)
    if expected == [CALLING]:
        assert rows[0].get("tools") == [TOOL] or "tools" not in name
    assert data.about is not None and sum(data.about["counts"].values()) == len(expected)


REFUSED: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "an unknown shape": (
        "s.csv",
        b"document,summary\nlong,short\n",
        {},
        "s.csv: line 2 has a shape that is not known: it has document, summary; say what they are, for example "
        '[data] columns = { prompt = "document", completion = "summary" }',
    ),
    **{
        f"half of a pair: {', '.join(row)}": (
            "q.jsonl",
            jsonl([row]),
            {},
            f"a shape that is not known: it has {', '.join(row)}",
        )
        for row in (
            {"source": "level?", "target": "three zero"},
            {"question": "level?", "answers": ["three zero"]},
            {"prompt": "level?", "responses": [RESPONSE]},
            {"instruction": "level?", "outputs": ["three zero"]},
        )
    },
    **{
        f"{', '.join(row)}, of which {key} is null": (
            "q.jsonl",
            jsonl([{**row, key: None}, {**row, key: None}]),
            {},
            f"line 1 has a shape that is not known: it has {', '.join(row)}, {key}; say what they are",
        )
        for row, keys in (
            ({"passage": "p", "reply": "r"}, ("code", "data", "input", "body", "turns", "query", "output")),
            ({"passage": "p", "target": "r"}, ("input",)),
            ({"summary": "s"}, ("body", "data")),
            ({"id": "a", "thread": [RESPONSE]}, ("conversations",)),
        )
        for key in keys
    },
    "an unknown shape beside pairs, with a null": (
        "q.jsonl",
        jsonl([*keyed("prompt", "completion"), {"passage": "p", "reply": "r", "input": None}]),
        {},
        "line 3 has a shape that is not known: it has passage, reply, input",
    ),
    "named messages that are none, with a null": (
        "q.jsonl",
        jsonl([{"conv": "not a list", "text": None}]),
        {"columns": {"messages": "conv"}},
        "line 1 has no chat: it has conv, text",
    ),
    "messages that are none, with a null": (
        "q.jsonl",
        jsonl([{"messages": "x", "text": None, "turns": None}]),
        {"format": "chat"},
        "line 1 has no chat: it has messages, text",
    ),
    "half of a pair, named, beside a text that is null": (
        "q.jsonl",
        jsonl([{"Q": "q", "text": None}]),
        {"columns": {"prompt": "Q"}},
        "line 1 has a shape that is not known: it has Q, text",
    ),
    "half of a pair, named and null, without the other": (
        "q.jsonl",
        jsonl([{"Q": None, "reply": "r"}]),
        {"columns": {"prompt": "Q"}},
        "line 1 has a shape that is not known: it has Q, reply",
    ),
    "Feather of version 1": ("q.feather", b"FEA1\0\0\0\0", {}, "q.feather is Feather of version 1, which is not read"),
    "another shape than named": ("q.jsonl", jsonl(ALPACA), {"format": "sharegpt"}, "line 1 has no sharegpt: it has"),
    "a column that is not there": (
        "q.jsonl",
        jsonl(ALPACA),
        {"columns": {"prompt": "Q", "completion": "output"}},
        "line 1 has no Q, which is to be its prompt: it has instruction",
    ),
    "a bad line": ("q.jsonl", jsonl(ALPACA) + b"{bad\n" + jsonl(ALPACA), {}, "q.jsonl: line 3 is no JSON"),
    "a fault in the middle of an array": (
        "q.json",
        json.dumps(ALPACA).replace('}, {"instruction": "h', '}, {"instruction" "h').encode(),
        {},
        "q.json: row 2 is no JSON, nor what follows",
    ),
    "an array that ends early": ("q.json", json.dumps(ALPACA).encode()[:-20], {}, "q.json: row 2 is no JSON"),
    "several lists": (
        "q.json",
        json.dumps({"train": ALPACA, "test": ALPACA}).encode(),
        {},
        'q.json: row 3 is no object, but \'"test"',
    ),
    "rows of a CSV with other fields": ("q.csv", b"prompt,response\na,b\nc\n", {}, "q.csv: line 3 has 1 fields, and"),
    "a CSV with an open quote": (
        "q.csv",
        b'prompt,response\na,b\n"a,b\nc,d\n',
        {},
        "q.csv cannot be read: line 3: unexpected end of data",
    ),
    "Windows-1252": ("q.csv", "prompt,response\nà,b\n".encode("cp1252"), {}, "q.csv is not UTF-8: if it is Windows"),
    "a ZIP archive": ("q.jsonl", zipped(jsonl(ALPACA)), {}, "q.jsonl is a zip archive, which is not read: `funzip`"),
    "a Git LFS pointer": ("q.parquet", b"version https://git-lfs.github.com/spec/v1\noid 0\n", {}, "Git LFS pointer"),
    "a cut gzip": ("q.jsonl.gz", gzip.compress(jsonl(ALPACA * 99))[:-30], {}, "q.jsonl.gz cannot be read"),
    "an unknown role": (
        "q.jsonl",
        jsonl([{"messages": PAIRS[0]}, {"messages": [{"role": "moderator", "content": "a"}]}]),
        {"valid": 0.1},
        "q.jsonl: line 2 message 1 has the role 'moderator'",
    ),
    "an image": (
        "q.jsonl",
        jsonl([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]),
        {},
        "message 1 holds more than text",
    ),
    "an answer that is a number": (
        "mmlu.jsonl",
        jsonl([{"question": "a?", "choices": ["b", "c"], "answer": 1}]),
        {},
        "line 1 has as its completion no text, but 1",
    ),
    "texts among pairs": (
        "q.jsonl",
        jsonl([*ALPACA, {"text": "tower"}]),
        {},
        "line 3 is text, and the rows before are Alpaca",
    ),
    "half of a surrogate pair": (
        "q.jsonl",
        b'{"question": "a \\ud83d", "answer": "b"}\n',
        {},
        "q.jsonl: line 1 has half of a surrogate pair (\\ud83d)",
    ),
    "titles without their texts": (
        "squad.json",
        json.dumps({"version": "1", "data": [{"title": "t", "paragraphs": [{"context": "c"}]}]}).encode(),
        {},
        "row 1 has a shape that is not known: it has title, paragraphs",
    ),
    "texts without a header": (
        "t.csv",
        b"the first of the texts\nthe second of the texts\n",
        {},
        "t.csv cannot be read: its first line is a text, where the header is to be",
    ),
    "no row": ("q.jsonl", b"\n", {}, "q.jsonl has no row to train on"),
    "no row to train on": (
        "q.jsonl",
        jsonl([{"question": "a", "answer": ""}]),
        {},
        "q.jsonl has no row to train on: 1 without an answer",
    ),
    "equal faults": ("q.jsonl", b"5\n" * 9, {"valid": 0}, "q.jsonl: line 1 is no JSON object (and 8 more like it)"),
    "many faults": ("q.jsonl", b"".join(b"{bad\n" + b" " * n for n in range(9)), {"valid": 0}, ", and 5 more rows"),
    "a number as the text": (
        "q.jsonl",
        jsonl([{"text": 1}]),
        {"valid": 0},
        "no key whose value is a text, among text",
    ),
    "messages by another name": (
        "q.jsonl",
        jsonl([{"id": "x", "lines": [{"role": "user", "content": "a"}]}]),
        {},
        'it has id, lines; say what they are, for example [data] columns = { messages = "lines" }',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_data_is_refused_with_the_row_and_the_reason(tmp_path: Path, home: Path, name: str) -> None:
    file, raw, chosen, reason = REFUSED[name]
    (tmp_path / file).write_bytes(raw)
    with pytest.raises(DataError) as refused:
        standard_data(tmp_path / file, {**OPTIONS, "data": chosen})
    assert reason in str(refused.value)
    # Nothing half done stays.
    assert [*(home / "node" / "data").iterdir()] == []


def test_without_pyarrow_parquet_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=f"for which pyarrow is missing: `uv pip install --python {sys.executable}"):
        standard_data(tmp_path / "a.parquet", OPTIONS)


@pytest.mark.parametrize(
    ("files", "counts"),
    [
        (
            {"data/train-00000-of-00002.jsonl": 3, "data/train-00001-of-00002.jsonl": 2, "data/test-0.jsonl": 1},
            (5, 0, 1),
        ),
        ({"train/a.jsonl": 2, "validation/a.jsonl": 1}, (2, 1, 0)),
        ({"gsm8k_train.jsonl": 2, "gsm8k_dev.jsonl": 1, "README.md": 1, "dataset_info.json": 1}, (2, 1, 0)),
        ({"alpaca.jsonl": 2, "sub/more.jsonl": 2, ".hidden/x.jsonl": 1}, (4, 0, 0)),
        ({"train.jsonl": 2, "valid.jsonl": 1, "old.jsonl": 1}, (2, 1, 0)),
    ],
)
def test_the_files_of_a_folder_are_split_by_their_names(
    tmp_path: Path, files: dict[str, int], counts: tuple[int, ...]
) -> None:
    for number, (name, count) in enumerate(files.items()):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jsonl([{"question": f"{number} {row}", "answer": "b"} for row in range(count)]))
    about = standard_data(tmp_path / "set", {**OPTIONS, "data": {"valid": 0}}).about
    assert about is not None
    assert tuple(about["counts"].get(name, 0) for name in ("train", "valid", "test")) == counts


def numbered(data: StandardData) -> dict[str, list[int]]:
    """The numbers of the rows in each file."""
    return {
        path.stem: [int(json.loads(line)["messages"][0]["content"]) for line in path.read_text().splitlines()]
        for path in data.folder.glob("*.jsonl")
    }


@pytest.mark.parametrize(
    ("splits", "rows"),
    [
        # mlx-lm's defaults; percents are rounded, as datasets does: 3.5 to 4, -3.5 to -4.
        ({"train": "train[:80%]", "valid": "train[-10%:]"}, {"train": range(28), "valid": range(31, 35)}),
        ({"train": "train[30:]+test[:-1]"}, {"train": [*range(30, 35), 100, 101]}),
        ({"train": "train", "test": "validation"}, {"train": range(35), "test": range(200, 201)}),
        ({"train": "train_sft[1:2]", "valid": "test"}, {"train": [301], "valid": range(100, 103)}),
        ({"train": "train[:2%]"}, {"train": range(1)}),
    ],
)
def test_splits_are_rows_of_a_data_sets_own_splits(
    tmp_path: Path, splits: dict[str, str], rows: dict[str, list[int]]
) -> None:
    stored = {
        "train-00000-of-00002": range(20),
        "train-00001-of-00002": range(20, 35),
        "test-00000-of-00001": range(100, 103),
        "validation": range(200, 201),
        "train_sft-00000-of-00001-a3ecf92756993583": range(300, 303),
    }
    (tmp_path / "main").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_bytes(jsonl([{"prompt": "999", "completion": "b"}]))
    for name, numbers in stored.items():
        lines = jsonl([{"question": str(number), "answer": "b"} for number in numbers])
        (tmp_path / "main" / f"{name}.jsonl").write_bytes(lines)
    data = standard_data(tmp_path, {**OPTIONS, "data": {"subset": "main", "splits": splits}})
    assert numbered(data) == {name: [*numbers] for name, numbers in rows.items()}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"subset": "socratic"}, "no folder socratic"),
        ({"splits": {"train": "train_gen"}}, "no split train_gen"),
        ({"splits": {"train": "validation"}}, "no split validation"),
    ],
)
def test_a_subset_or_split_that_is_not_there_is_named(tmp_path: Path, options: dict[str, object], why: str) -> None:
    (tmp_path / "train-00000-of-00001.jsonl").write_bytes(jsonl(keyed("question", "answer")))
    with pytest.raises(DataError, match=why):
        standard_data(tmp_path, {**OPTIONS, "data": options})


def test_documents_are_cut_at_paragraphs_into_pieces_that_are_not_truncated(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    paragraphs = [f"{number} {'word ' * 60}".strip() for number in range(40)]
    (folder / "development.txt").write_text("\n\n".join(paragraphs[:20]))
    (folder / "quickstart.md").write_text("\n\n".join(paragraphs[20:]))
    (folder / "test.txt").write_text("tower, hold")
    data = standard_data(folder, {**OPTIONS, "max_seq_length": 300, "data": {"valid": 0}})
    texts = [json.loads(line)["text"] for line in (data.folder / "train.jsonl").read_text().splitlines()]
    assert "\n\n".join(texts) == "\n\n".join(paragraphs)
    assert 10 <= len(texts) <= 20 and max(map(len, texts)) <= 900
    assert json.loads((data.folder / "test.jsonl").read_text()) == {"text": "tower, hold"}


def split(path: Path, rows: list[dict[str, Any]], **shares: float) -> dict[str, set[str]]:
    path.write_bytes(jsonl(rows))
    folder = standard_data(path, {**OPTIONS, "data": shares}).folder
    return {file.stem: {*file.read_text().splitlines()} for file in folder.glob("*.jsonl")}


def test_rows_are_split_by_their_hash_so_that_others_move_none(tmp_path: Path) -> None:
    rows = [{"question": f"level {number}?", "answer": "three zero"} for number in range(2000)]
    before = split(tmp_path / "a.jsonl", rows[:1000], valid=0.1, test=0.05)
    after = split(tmp_path / "a.jsonl", rows[::-1], valid=0.1, test=0.05)
    assert all(before[name] <= after[name] for name in ("train", "valid", "test"))
    assert 70 <= len(before["valid"]) <= 130 and 30 <= len(before["test"]) <= 75
    assert sum(map(len, after.values())) == 2000
    # A test split that is added takes nothing from the validation.
    assert split(tmp_path / "a.jsonl", rows[:1000], valid=0.1)["valid"] == before["valid"]


def test_the_same_content_is_converted_once_and_has_the_same_bytes(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "qa.csv").write_text(CSV)
    first = standard_data(tmp_path / "one" / "qa.csv", OPTIONS).folder
    written = (first / "train.jsonl").stat()
    assert standard_data(tmp_path / "two" / "qa.csv", OPTIONS).folder == first
    assert (first / "train.jsonl").stat().st_mtime_ns == written.st_mtime_ns
    raw = (first / "train.jsonl").read_bytes()
    monkeypatch.setenv("FLIGHTDECK_HOME", str(home / "other"))
    other = standard_data(tmp_path / "two" / "qa.csv", OPTIONS).folder
    assert other != first and other.name == first.name and (other / "train.jsonl").read_bytes() == raw
    # One that is not whole is made anew.
    (other / "conversion.json").unlink()
    assert standard_data(tmp_path / "two" / "qa.csv", OPTIONS).folder == other and (other / "conversion.json").exists()
    (tmp_path / "two" / "qa.csv").write_text(f"{CSV}3,wind?,calm\n")
    assert standard_data(tmp_path / "two" / "qa.csv", OPTIONS).folder.name != first.name


def test_a_standard_folder_is_split_only_where_that_is_said(tmp_path: Path) -> None:
    rows = [{"prompt": f"level {number}?", "completion": "three"} for number in range(300)]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(jsonl(rows))
    about = standard_data(tmp_path / "set", {**OPTIONS, "data": {"test": 0.2}}).about
    assert about is not None and (about["split_off"], {*about["counts"]}) == ({"test": 0.2}, {"train", "test"})


def test_a_split_without_rows_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\na,b\n")
    data = standard_data(tmp_path / "qa.csv", {**OPTIONS, "data": {"valid": 1e-9}})
    # mlx-lm ends at an empty one.
    assert data.about is not None and data.about["counts"] == {"train": 1, "valid": 0}
    assert [path.name for path in data.folder.glob("*.jsonl")] == ["train.jsonl"]


def test_keys_of_messages_without_a_value_are_left_out_and_others_are_named(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "wind?", "tool_calls": [], "name": "", "refusal": None},
        {"role": "assistant", "content": "calm", "tool_calls": [], "channel": "final"},
    ]
    (tmp_path / "chats.jsonl").write_bytes(jsonl([{"messages": turns}]))
    data = standard_data(tmp_path / "chats.jsonl", {**OPTIONS, "data": {"valid": 0}})
    expected = [{"role": "user", "content": "wind?"}, {"role": "assistant", "content": "calm"}]
    assert rows_of(data) == [{"messages": expected}]
    assert data.about is not None and data.about["unread"] == ["channel of messages"]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([{"Q": "q", "answer": "a"}, {"Q": "q", "answer": None}], {"prompt": "Q"}),
        ([{"Q": "q", "answer": None}, {"Q": "q", "answer": "a"}], {"prompt": "Q"}),
        ([{"problem": "p", "answer": text, "level": "easy"} for text in ("a", None)], {}),
        ([{"conversations": text, "uid": "seven"} for text in (SHAREGPT, None)], {}),
    ],
)
def test_a_null_in_a_named_column_or_in_the_shape_of_earlier_rows_leaves_its_row_out(
    tmp_path: Path, rows: list[dict[str, Any]], columns: dict[str, str]
) -> None:
    (file := tmp_path / "rows.jsonl").write_bytes(jsonl(rows))
    about = standard_data(file, {**OPTIONS, "data": {"columns": columns, "valid": 0.0}}).about
    assert about is not None
    assert sum(about["counts"].values()) == 1 and sum(count for count, _ in about["skipped"].values()) == 1


def test_the_file_of_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (folder := tmp_path / "rows").mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(keyed("q", "a")))
    (folder / "b.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(DataError, match=r"/rows/b\.jsonl cannot be read: No such file or directory$"):
        standard_data(folder, OPTIONS)


def test_a_value_that_is_not_of_json_is_refused_with_its_row(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"question": "a", "answer": "b", "tools": [{"since": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: row 1 holds what JSON cannot: .*datetime"):
        standard_data(tmp_path / "a.parquet", OPTIONS)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qa.csv").write_text(CSV)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=f"qa.csv cannot be converted in {tmp_path}/file/node/data: "):
        standard_data(tmp_path / "qa.csv", OPTIONS)
    monkeypatch.setenv("FLIGHTDECK_HOME", str(home))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(DataError, match=f"qa.csv cannot be converted in {home}/node/data: File too large"):
            standard_data(tmp_path / "qa.csv", OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_an_interrupted_conversion_has_left_is_removed(tmp_path: Path, home: Path) -> None:
    for name, age in ((".old", 7200), (".new", 60), ("unused", 40 * 86_400), ("used", 86_400)):
        (folder := home / "node" / "data" / name).mkdir(parents=True)
        (folder / "train.jsonl").touch()
        for path in (folder / "train.jsonl", folder):
            os.utime(path, (time.time() - age,) * 2)
    (tmp_path / "qa.csv").write_text(CSV)
    folder = standard_data(tmp_path / "qa.csv", OPTIONS).folder
    assert {path.name for path in (home / "node" / "data").iterdir()} == {".new", "used", folder.name}


def test_many_processes_convert_the_same_at_once(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\n" + "".join(f"{row}?,b\n" for row in range(3000)))
    argv = [sys.executable, "-c", MEMORY, str(tmp_path / "qa.csv"), json.dumps(OPTIONS)]
    children = [subprocess.Popen(argv, cwd=Path(__file__).parents[3], stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4


def test_a_folder_of_mlx_lm_is_left_as_it_is(tmp_path: Path) -> None:
    rows = keyed("prompt", "completion")
    for standard in (rows, [{**row, "label": False} for row in rows]):
        (tmp_path / "train.jsonl").write_bytes(jsonl(standard))
        assert standard_data(tmp_path, OPTIONS) == (tmp_path, None)
        assert standard_data(tmp_path / "train.jsonl", OPTIONS) == (tmp_path, None)
    own_keys = {**OPTIONS, "prompt": "instruction", "completion": "output"}
    (tmp_path / "train.jsonl").write_bytes(jsonl(ALPACA))
    assert standard_data(tmp_path, own_keys) == (tmp_path, None)
    assert standard_data(tmp_path, OPTIONS).folder != tmp_path


MEMORY = """
import json, re, sys
from pathlib import Path
from engine.node.standard_data import standard_data
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
standard_data(Path(sys.argv[1]), json.loads(sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.needs("linux")
@pytest.mark.parametrize(
    "suffix", ["json", *(pytest.param(suffix, marks=pytest.mark.slow) for suffix in ("csv", "jsonl"))]
)
def test_a_large_file_takes_no_more_memory_than_a_small_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"large.{suffix}"
    row = {"question": "level? " * 80, "answer": "three zero " * 80}
    with path.open("w") as file:
        file.write("[" if suffix == "json" else "question,answer\n" if suffix == "csv" else "")
        for number in range(7_000):
            if suffix == "csv":
                file.write(f"{number} {row['question']},{row['answer']}\n")
            else:
                text = json.dumps({**row, "question": f"{number} {row['question']}"})
                file.write(f"{text}, " if suffix == "json" and number < 6_999 else f"{text}\n")
        file.write("]" if suffix == "json" else "")
    assert path.stat().st_size > 10e6
    argv = [sys.executable, "-c", MEMORY, str(path), json.dumps(OPTIONS)]
    finished = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert int(finished.stdout) < 3_000, "KiB"


def test_ranks_of_one_host_read_an_untouched_source_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes of the same size, with the time of the last write put back, are noticed."""
    opened = list[Path]()

    def counted(path: Path) -> Any:
        opened.append(path)
        return open_regular(path)

    monkeypatch.setattr(module, "_SETTLED_S", -1.0)
    monkeypatch.setattr(module, "open_regular", counted)
    options, path = {**OPTIONS, "data": {"valid": 0}}, tmp_path / "qa.jsonl"
    path.write_bytes(jsonl(keyed("question", "answer")))
    folders = [standard_data(path, options).folder for _ in range(3)]
    assert len({*folders}) == 1 and opened == [path]
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"three zero", b"three nine"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = standard_data(path, options).folder
    assert other != folders[0] and opened == [path, path]
    assert standard_data(path, {**options, "max_seq_length": 300}).folder not in (other, *folders)
    assert opened == [path, path], "the options are no part of what is read"
