"""The `template` probe: rows that the chat template refuses, for which a rank would end after it has loaded its model;
how many of them are truncated, or have nothing to train on; and how long they are."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import random
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.node.probes.dataset import DataRow, count, read_rows
from engine.node.probes.model_files import something_else
from engine.node.source_files import DataError
from engine.node.standard_data import standard_files
from engine.protocol.attempt import open_regular
from engine.protocol.jsonl import form_of, is_blank, lines, row_tokeniser

_MEASURED = 2_000
"""Most rows per file that are tokenised each: a few seconds."""
_READ_S = 10.0
"""Longest time to read one file: 40,000 rows of six messages on a busy machine."""
_SAMPLE_S = 3.0
"""Longest time to read all of a file once more for rows at random, and to tokenise these."""
_REFUSED = 20
TEXT_MASKED = "mask_prompt = true needs prompt/completion or chat lines, these are text"
_KEPT = ("role", "type")
"""Keys whose values a template decides by."""
Loaded = tuple[Any, Callable[[dict[str, Any]], tuple[list[int], int]]]
"""The model's tokenizer, and what makes of a row its tokens and the index of the first target."""


def outline(value: Any, key: str = "") -> Any:
    """The value without its texts: rows of equal outlines are the same to a template."""
    if isinstance(value, dict):
        return {name: outline(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [outline(inner) for inner in value]
    if isinstance(value, str):
        # Templates of reasoning models look for the end of their thoughts.
        return value if key in _KEPT else ("</think>" in value, bool(value.strip()))
    return type(value).__name__


def _mlx_lm(model: Path, keys: Mapping[str, Any]) -> Loaded:
    create_dataset = importlib.import_module("mlx_lm.tuner.datasets").create_dataset
    tokenizer = importlib.import_module("mlx_lm.utils").load_tokenizer(
        model, {"trust_remote_code": keys["trust_remote_code"]}
    )
    features = {f"{name}_feature": keys[name] for name in ("prompt", "completion", "chat", "text")}
    job = types.SimpleNamespace(mask_prompt=keys["mask_prompt"], **features)
    return tokenizer, lambda row: create_dataset([row], tokenizer, job).process(row)


def _transformers(model: Path, keys: Mapping[str, Any]) -> Loaded:
    load = importlib.import_module("transformers").AutoTokenizer.from_pretrained
    tokenizer = load(str(model), local_files_only=True, trust_remote_code=keys["trust_remote_code"])
    tokenise = row_tokeniser(tokenizer, keys, mask_prompt=keys["mask_prompt"])
    return tokenizer, lambda row: tokenise(row, form_of(row, keys))


class _Trial:
    """The rows of one file, tokenised as far as there is time."""

    def __init__(self, path: Path, keys: dict[str, Any], load: Callable[[], Loaded], fast: Any) -> None:
        """`fast`: the tokenizer by the package tokenizers alone, which is there in a moment; perhaps None."""
        self.path = path
        self._keys = keys
        self._load = load
        self._fast = fast
        self._until = math.inf
        self._kinds: dict[str, tuple[str | None, bool]] = {}
        """Outline → why such rows are refused, and whether they begin as their prompt: a template treats them alike."""
        self.refused: dict[str, dict[str, Any]] = {}
        self.tally: dict[str, list[int]] = {}
        self.lengths = Counter[int]()
        """Rows by their tokens, also of those that are truncated: of all rows, or of some from the whole file."""

    def run(self) -> None:
        """Raises OSError, and what loading the tokenizer raises."""
        with open_regular(self.path) as file:
            for row in read_rows(file, self._keys):
                if row.form == "text" and self._keys["mask_prompt"]:
                    return self.refuse(0, f"{self.path}: {TEXT_MASKED}")
                if row.fault is not None:
                    self.refuse(row.number, row.fault)
                elif not (self._count_text(row.number, row.content) if row.form == "text" else self._try(row)):
                    self.tally["more"] = [1, row.number]
                    break
            if "more" in self.tally:
                file.seek(0)
                self._sample(lines(file))
        return None

    def _sample(self, every: Iterable[bytes]) -> None:
        """Measure rows at random from the whole file, as far as there is time: its head may be of one kind."""
        chosen, sample, until = random.Random(0), list[bytes](), time.monotonic() + _SAMPLE_S
        for number, line in enumerate(line for line in every if not is_blank(line)):
            if number < _MEASURED:
                sample.append(line)
            elif (place := chosen.randrange(number + 1)) < _MEASURED:
                sample[place] = line
            if time.monotonic() > until:
                break
        chosen.shuffle(sample)
        self.lengths, until = Counter(), time.monotonic() + _SAMPLE_S
        for row in read_rows(sample, self._keys):
            if time.monotonic() > until:
                break
            if row.form == "text" and row.fault is None and self._fast is not None:
                self.lengths[self._text_tokens(row.content)] += 1
            elif row.form != "text" and row.fault is None:
                with contextlib.suppress(Exception):
                    self.lengths[len(self._load()[1](row.row)[0])] += 1

    def _text_tokens(self, text: str) -> int:
        """With the one that ends it, which mlx-lm adds."""
        return len(self._fast.encode(text).ids) + 1

    def _count_text(self, number: int, text: str) -> bool:
        """False when there is no time for more, as `_try`."""
        self._until = min(self._until, time.monotonic() + _READ_S)
        if self._fast is not None:
            added, tokens = self._fast.encode("").ids, self._text_tokens(text)
            if added and text.startswith(self._fast.id_to_token(added[0])):
                count(self.tally, "bos", number)
            if tokens > self._keys["max_seq_length"]:
                count(self.tally, "truncated", number)
            self.lengths[tokens] += 1
        return count(self.tally, "rows", number) < _MEASURED and time.monotonic() < self._until

    def _try(self, row: DataRow) -> bool:
        tokenizer, process = self._load()
        self._until = min(self._until, time.monotonic() + _READ_S)
        shape = json.dumps(outline(row.row), sort_keys=True)
        why, prompted = self._kinds.get(shape, (None, True))
        if shape not in self._kinds or (why is None and self.tally.get("rows", [0])[0] < _MEASURED):
            try:
                tokens, start = process(row.row)
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                why = f"is refused by the model's chat template ({reason})"
            else:
                if shape not in self._kinds:
                    prompted = _begins_with_prompt(tokenizer, row.content, row.row.get("tools"))
                self.lengths[len(tokens)] += 1
                kept = min(len(tokens), self._keys["max_seq_length"])
                flags = {"truncated": kept < len(tokens), "no_target": kept <= max(start, 1), "no_prefix": not prompted}
                for what in ("rows", *filter(flags.get, flags)):
                    count(self.tally, what, row.number)
            self._kinds.setdefault(shape, (why, prompted))
        elif why is None:
            self.tally["more"] = [1, row.number]
        if why is not None:
            self.refuse(row.number, why)
        return time.monotonic() < self._until

    def refuse(self, number: int, why: str) -> None:
        new = {"file": str(self.path), "line": number, "count": 0, "why": why}
        self.refused.setdefault(why, new)["count"] += 1


def _begins_with_prompt(tokenizer: Any, messages: list[Any], tools: Any) -> bool:
    """A row begins as what generates its last message; True where that is not known."""
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        render = functools.partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
        with contextlib.suppress(Exception):
            return bool(render(messages).startswith(render(messages[:-1], add_generation_prompt=True)))
    return True


def probe_template(model: str, settings: str, *files: str) -> dict[str, Any]:
    """`refused`: for each file and reason `file`, `line` (0: the file as a whole), `count` and `why`; `tallies`: file →
    tally; `lengths`: file → tokens → rows; `problem` if the rows could not be tried. `settings` is JSON: {"prompt": …,
    "completion": …, "chat": …, "text": …, "mask_prompt": …, "trust_remote_code": …, "max_seq_length": …, "framework":
    …}."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    keys = json.loads(settings)
    loader = _transformers if keys.get("framework") == "torch" else _mlx_lm
    load, fast = functools.lru_cache(None)(functools.partial(loader, Path(model), keys)), None
    try:
        with contextlib.suppress(Exception):
            fast = importlib.import_module("tokenizers").Tokenizer.from_file(f"{model}/tokenizer.json")
            fast.no_truncation()
        trials = [_Trial(path, keys, load, fast) for path in standard_files(files, keys)[0]]
        for trial in trials:
            if trial.path.is_file():
                trial.run()
    except DataError as error:
        return {"refused": [{"file": files[0], "line": 0, "count": 1, "why": str(error)}]}
    except Exception as error:
        # The libraries take the path of a folder that is not there for a name on the Hub.
        return {"problem": something_else(Path(model)) or f"{type(error).__name__}: {error}"}
    refused = [refusal for trial in trials for refusal in trial.refused.values()]
    measured = {"tallies": {str(trial.path): trial.tally for trial in trials}}
    return {"refused": refused[:_REFUSED], **measured, "lengths": dict(zip(files, (trial.lengths for trial in trials)))}  # noqa: B905


def probe_rows(model: str, settings: str, count: str, file: str) -> dict[str, Any]:
    """`rows`: `count` at equal distances in a file, as the model sees them: `line`, `tokens`, `targets` and `cut` (by
    max_seq_length) of each, and its text in two parts, of which the first is `masked`; `problem` if there are none.
    `model`: "" for the text alone. `settings`: as for `probe_template`."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    keys = json.loads(settings)
    try:
        (path,), _ = standard_files([file], keys)
        loader = _transformers if keys.get("framework") == "torch" else _mlx_lm
        loaded = loader(Path(model), keys) if model else None
        with open_regular(path) as opened:
            total = sum(not is_blank(line) for line in lines(opened))
            wanted = {total * number // int(count) for number in range(int(count))}
            opened.seek(0)
            numbered = ((number, line) for number, line in enumerate(lines(opened), 1) if not is_blank(line))
            chosen = [item for index, item in enumerate(numbered) if index in wanted]
        rows = zip([number for number, _ in chosen], read_rows([line for _, line in chosen], keys))  # noqa: B905
        return {"rows": [{"line": number, **_seen(row, loaded, keys)} for number, row in rows if row.fault is None]}
    except Exception as error:
        return {"problem": str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"}


def _seen(row: DataRow, loaded: Loaded | None, keys: dict[str, Any]) -> dict[str, Any]:
    if loaded is None:
        turns = (
            [f"{message['role']}: {message.get('content')}" for message in row.content] if row.form != "text" else []
        )
        return {"masked": "", "trained": "\n".join(turns) or row.content, "tokens": 0, "targets": 0, "cut": 0}
    tokenizer, process = loaded
    tokens, start = process(row.row)
    kept = tokens[: keys["max_seq_length"]]
    parts = {"masked": tokenizer.decode(kept[:start]), "trained": tokenizer.decode(kept[start:])}
    cut, targets = len(tokens) - len(kept), max(0, len(kept) - max(start, 1))
    return {**parts, "tokens": len(tokens), "targets": targets, "cut": cut}
