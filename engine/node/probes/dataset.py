"""The `jsonl` and `examples` probes: JSONL files, read as mlx-lm would."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.node.probes import did_you_mean, reason_of

FAULT_LIMIT = 50
SHOWN = 60
"""Characters of a bad line."""


def form_of(sample: dict[str, Any], keys: dict[str, str]) -> str | None:
    """mlx-lm's own order of recognition (tuner/datasets.py, create_dataset); None is no form it reads."""
    if keys["prompt"] in sample and keys["completion"] in sample:
        return "completions"
    if keys["chat"] in sample:
        return "chat"
    if keys["text"] in sample:
        return "text"
    return None


def fault_of(sample: Any, form: str | None, keys: dict[str, str]) -> str | None:
    """Why mlx-lm would fail on one line, given the form of the file's first line."""
    if not isinstance(sample, dict):
        return "is no JSON object"
    if form is None:
        return f"has none of {keys['text']}, {keys['prompt']} + {keys['completion']}, {keys['chat']}"
    if form == "chat":
        messages = sample.get(keys["chat"])
        if not isinstance(messages, list) or not messages:
            return f"{keys['chat']} is no list of messages"
        if not all(isinstance(message, dict) and "role" in message for message in messages):
            return f"a message in {keys['chat']} has no role"
        return None
    wanted = [keys["text"]] if form == "text" else [keys["prompt"], keys["completion"]]
    for key in wanted:
        if key not in sample:
            return f"has no {key}, as the first line has"
        if not isinstance(sample[key], str):
            return f"{key} is no text"
        if form == "text" and not sample[key]:
            return f"{key} is empty"
    return None


def read_lines(path: Path, keys: dict[str, str]) -> dict[str, Any]:
    """`lines`, `examples` (lines that are not blank: the trainer skips those), `sha256`, `form`, and `faults` as
    [line number from 1, what is wrong and how the line begins], at most FAULT_LIMIT of `fault_count`."""
    digest = hashlib.sha256()
    faults: list[tuple[int, str]] = []
    lines = examples = fault_count = 0
    form: str | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            lines = number
            if not line.strip():
                continue
            examples += 1
            fault: str | None
            try:
                sample = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                fault = "is not UTF-8"
            except RecursionError:
                fault = "is nested too deep"
            except ValueError as error:
                fault = f"is no JSON: {error}"
            else:
                if form is None and isinstance(sample, dict):
                    form = form_of(sample, keys)
                fault = fault_of(sample, form, keys)
            if fault is not None:
                fault_count += 1
                if len(faults) < FAULT_LIMIT:
                    faults.append((number, f"{fault}: {line.decode(errors='replace').strip()[:SHOWN]}"))
    return {
        "lines": lines,
        "examples": examples,
        "sha256": digest.hexdigest(),
        "form": form,
        "faults": faults,
        "fault_count": fault_count,
    }


def check_file(path: Path, keys: dict[str, str]) -> dict[str, Any]:
    """`read_lines`, or the `problem` that prevents it, and whether the file is `absent`."""
    try:
        if not path.parent.is_dir():
            hint = did_you_mean(path.parent, "train.jsonl")
            return {"problem": f"no such directory: {path.parent}{hint}", "absent": False}
        if not path.is_file():
            return {"problem": f"{path} is missing{did_you_mean(path)}", "absent": True}
        return read_lines(path, keys)
    except OSError as error:
        return {"problem": f"{path} cannot be read: {reason_of(error, path)}", "absent": False}


def probe_jsonl(keys: str, *files: str) -> dict[str, Any]:
    """`files` in the order of the arguments. `keys` is JSON: {"prompt": …, "completion": …, "chat": …, "text": …}."""
    return {"files": [check_file(Path(file), json.loads(keys)) for file in files]}


def probe_examples(file: str) -> dict[str, Any]:
    """`examples` (lines that are not blank), or `problem`. Nothing is parsed: millions take a moment."""
    try:
        with Path(file).open("rb") as lines:
            return {"examples": sum(1 for line in lines if not line.isspace())}
    except OSError as error:
        return {"problem": f"{file}: {reason_of(error, Path(file))}"}
