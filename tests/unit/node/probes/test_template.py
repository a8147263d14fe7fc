"""The rows of a file as the model's own tokenizer and chat template have them: what is counted, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from engine.checks.obstacles import row_warnings, rows_refused
from engine.cluster.probe_results import Tally, TemplateReport
from engine.node.probes import template
from engine.protocol.job import Job
from engine.trainer.model import row_format
from engine.training.data import Split
from tests.demo_copies import made_demo

SETTINGS = {"mask_prompt": True, "max_seq_length": 64}
KEYS = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}
REASONING = (
    "{% for m in messages %}{{ m.role + ': ' + m.content.split('</think>')[-1] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: <think>' }}{% endif %}"
)
"""As templates of reasoning models: thoughts are cut from what was said, and begun in what is asked."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "model"
    shutil.copytree(made_demo() / "model", folder)
    return folder


def configured(model: Path, folder: Path, **changes: object) -> Path:
    copy = folder / "configured"
    shutil.copytree(model, copy)
    known = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**known, **changes}))
    return copy


def report(model: Path, folder: Path, rows: list[dict[str, Any]], **settings: object) -> TemplateReport:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {**KEYS, "mask_prompt": False, "trust_remote_code": False, "max_seq_length": 64, **settings}
    found = template.probe_template(str(model), json.dumps(keys), str(folder / "train.jsonl"))
    return TemplateReport.model_validate(found)


def tally(report: TemplateReport) -> Tally:
    (found,) = report.tallies.values()
    return found


def lengths(report: TemplateReport) -> dict[int, int]:
    (counted,) = report.lengths.values()
    return counted


def load_tokens(model: Path, folder: Path) -> list[int]:
    """The tokens of each row as the trainer has them."""
    job = Job(model, folder, folder, folder)
    split = Split(job, "train", row_format(job, load_tokenizer(model)), lambda _: None)
    return [len(tokens) for tokens, _ in split._examples(list(range(len(split))))]


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


LONG = "report the level of the runway light " * 12


def test_a_job_of_which_no_row_has_a_target_is_refused(model: Path, tmp_path: Path) -> None:
    masked = {"mask_prompt": True, "max_seq_length": 24}
    none = report(model, tmp_path, [chat(LONG, "yes"), chat(LONG, "no")], **masked)
    assert tally(none)["no_target"] == (2, 1)
    (refusal,) = rows_refused(none, masked)
    assert "train.jsonl: 2 of 2 rows (first: line 1) without a target, so that nothing is learned" in refusal
    some = report(model, tmp_path, [chat("a", "b"), chat(LONG, "no"), chat("c", "d")], **masked)
    assert rows_refused(some, masked) == []
    warnings = row_warnings({"train.jsonl": tally(some)}, masked)
    assert warnings[0].startswith("train.jsonl: 1 of 3 rows (first: line 2) without a target")
    assert warnings[1].endswith("longer than max_seq_length = 24 tokens, and truncated")


def test_a_template_whose_prompt_is_no_prefix_leaves_short_answers_without_a_target(
    model: Path, tmp_path: Path
) -> None:
    reasoning = configured(model, tmp_path, chat_template=REASONING)
    found = report(reasoning, tmp_path, [chat("level?", ""), chat("level?", "")], mask_prompt=True)
    assert rows_refused(found, SETTINGS)
    rows = [chat("level?", "<think>hm</think>three zero"), chat("and?", "three zero"), chat("over")]
    found = report(reasoning, tmp_path, rows, mask_prompt=True)
    assert tally(found)["no_prefix"] == (2, 1)
    warning = row_warnings({"train.jsonl": tally(found)}, SETTINGS)[-1]
    assert "a template for reasoning?" in warning and "nor what mask_prompt hides" in warning
    plain = report(model, tmp_path, rows, mask_prompt=True)
    assert "no_prefix" not in tally(plain)


@pytest.mark.parametrize("form", ["text", "chat", "completions"])
def test_truncated_rows_are_counted_as_mlx_lm_truncates_them(model: Path, tmp_path: Path, form: str) -> None:
    texts = ["short", LONG, "short again", LONG]
    rows = {
        "text": [{"text": text} for text in texts],
        "chat": [chat("a", text) for text in texts],
        "completions": [{"prompt": "a", "completion": text} for text in texts],
    }[form]
    found = report(model, tmp_path, rows)
    assert tally(found) == {"rows": (4, 1), "truncated": (2, 2)}
    tokens = [tokens for tokens, count in lengths(found).items() for _ in range(count)]
    expected = load_tokens(model, tmp_path)
    assert sorted(tokens) == sorted(expected) and max(tokens) > 64


def test_without_a_fast_tokenizer_text_is_not_measured(tmp_path: Path) -> None:
    assert tally(report(tmp_path / "none", tmp_path, [{"text": LONG}] * 3)) == {"rows": (3, 1)}
    assert report(tmp_path / "none", tmp_path, [chat("a", "b")]).problem == "no such directory"


def test_a_bos_that_the_tokenizer_adds_to_one_in_the_text_is_counted(model: Path, tmp_path: Path) -> None:
    adding = configured(model, tmp_path, bos_token="<|pad|>", add_bos_token=True)
    tokenizer = json.loads((adding / "tokenizer.json").read_text())
    number = next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == "<|pad|>")
    special = {"id": "<|pad|>", "ids": [number], "tokens": ["<|pad|>"]}
    single = [{"SpecialToken": {"id": "<|pad|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"<|pad|>": special}}
    (adding / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": processor}))
    rows = [{"text": "tower"}, {"text": "<|pad|>tower"}, {"text": "raven <|pad|>"}]
    assert tally(report(adding, tmp_path, rows)) == {"rows": (3, 1), "bos": (1, 2)}
    # This tokenizer adds none.
    (adding / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert tally(report(adding, tmp_path, rows)) == {"rows": (3, 1)}


def test_more_rows_than_are_tokenised_are_said_to_be_the_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_MEASURED", 10)
    found = tally(report(model, tmp_path, [{"text": LONG}] * 30))
    assert (found["rows"][0], "more" in found) == (10, True)
    (warning,) = row_warnings({"train.jsonl": found}, {"max_seq_length": 64})
    assert "10 of the first 10 rows (first: line 1) longer than max_seq_length = 64" in warning
    bad = {"messages": [{"role": "user", "content": None}]}
    (refused,) = report(model, tmp_path, [chat("a", "b")] * 20 + [bad] * 3).refused
    assert (refused.line, refused.count) == (21, 3) and "chat template" in refused.why


def test_the_lengths_of_a_long_file_are_those_of_the_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_MEASURED", 40)
    for short, long in (({"text": "tower"}, {"text": LONG}), (chat("a", "b"), chat("a", LONG))):
        counted = lengths(report(model, tmp_path, [short] * 300 + [long] * 300))
        assert sum(counted.values()) == 40 and 10 <= counted[max(counted)] <= 30


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"document": "a", "summary": "b"},
            "it has document, summary; say what they are in [data] columns",
        ),
        ({"text": "half \ud83d"}, "has half of a surrogate pair (\\ud83d)"),
    ],
)
def test_the_plan_says_of_a_row_what_preflight_says(model: Path, tmp_path: Path, row: dict[str, Any], why: str) -> None:
    (refusal,) = rows_refused(report(model, tmp_path, [row, row]), SETTINGS)
    assert refusal.startswith(f"{tmp_path}/train.jsonl: line 1 ") and refusal.endswith(", and 1 more line")
    assert why in refusal and "template" not in refusal


@pytest.mark.usefixtures("home")
def test_a_file_that_is_not_read_is_refused_as_a_whole(model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b"PK\x03\x04")
    keys = {**KEYS, "mask_prompt": False, "trust_remote_code": False, "max_seq_length": 64}
    found = template.probe_template(str(model), json.dumps(keys), str(tmp_path / "train.jsonl"))
    why = f"{tmp_path}/train.jsonl is a zip archive, which is not read: `funzip` converts it"
    assert rows_refused(TemplateReport.model_validate(found), SETTINGS) == [why]


def test_text_that_has_no_prompt_to_mask_is_refused(model: Path, tmp_path: Path) -> None:
    found = report(model, tmp_path, [{"text": "the sky"}], mask_prompt=True)
    assert rows_refused(found, SETTINGS) == [f"{tmp_path / 'train.jsonl'}: {template.TEXT_MASKED}"]


@pytest.mark.usefixtures("home")
def test_the_lengths_of_data_of_another_kind_are_told_by_the_name_that_was_asked_for(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\n" + "level?,three zero\n" * 9)
    asked = str(tmp_path / "qa.csv" / "train.jsonl")
    keys = {**KEYS, "mask_prompt": False, "trust_remote_code": False, "max_seq_length": 64, "data": {"valid": 0}}
    report = TemplateReport.model_validate(template.probe_template(str(model), json.dumps(keys), asked))
    assert [sum(lengths.values()) for lengths in report.lengths.values()] == [9] and [*report.lengths] == [asked]


@pytest.mark.parametrize("form", ["text", "chat"])
def test_rows_are_shown_as_the_trainer_has_them(model: Path, tmp_path: Path, form: str) -> None:
    rows = [{"text": f"level {number}"} if form == "text" else chat("level?", f"three {number}") for number in range(9)]
    (tmp_path / "train.jsonl").write_text("\n" + "".join(json.dumps(row) + "\n\n" for row in rows))
    keys = {**KEYS, "mask_prompt": form == "chat", "trust_remote_code": False, "max_seq_length": 64}
    shown = template.probe_rows(str(model), json.dumps(keys), "3", str(tmp_path / "train.jsonl"))["rows"]
    assert [row["line"] for row in shown] == [2, 8, 14]
    job = Job(model, tmp_path, tmp_path, tmp_path, mask_prompt=form == "chat")
    split = Split(job, "train", row_format(job, load_tokenizer(model)), lambda _: None)
    tokenizer = load_tokenizer(model)
    for index, row in zip((0, 3, 6), shown, strict=True):
        ((tokens, start),) = split._examples([index])
        assert row["masked"] + row["trained"] == tokenizer.decode(tokens[:start]) + tokenizer.decode(tokens[start:])
        assert (row["tokens"], row["targets"], row["cut"]) == (len(tokens), split.batch([index]).targets, 0)
        assert str(index) in row["trained"]
        assert ("level?" in row["masked"]) == (form == "chat")
    plain = template.probe_rows("", json.dumps(keys), "3", str(tmp_path / "train.jsonl"))["rows"]
    assert plain[1]["trained"] == ("level 3" if form == "text" else "user: level?\nassistant: three 3")
    broken = template.probe_rows(str(tmp_path), json.dumps(keys), "3", str(tmp_path / "train.jsonl"))
    assert broken["problem"]
