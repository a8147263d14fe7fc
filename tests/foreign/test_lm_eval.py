"""lm-eval's own tasks on what a run has trained, through mlx-lm's connection to it and through transformers': on this
machine, by the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demo_copies import made_demo
from tests.needs import FOREIGN

pytestmark = [pytest.mark.busy, pytest.mark.slow, pytest.mark.needs("foreign")]

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
{more}
doc_to_target: "{{{{{target}}}}}"
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
CONFIG = """\
[cluster]
name = "lm-eval"
[[node]]
name = "here"
python = "{python}"
[job]
framework = "{framework}"
model = "{model}"
data = "{data}"
fine_tune_type = "lora"
batch_size = 8
iters = 30
learning_rate = 1e-2
max_seq_length = 256
"""


def flightdeck(folder: Path, *words: str) -> str:
    command = [str(Path(sys.executable).with_name("flightdeck")), *words]
    surroundings = {**os.environ, "FLIGHTDECK_HOME": str(folder / "home")}
    done = subprocess.run(
        command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_tasks(folder: Path, data: Path) -> None:
    """Two to choose: between the true words after a beginning and the same words backwards, and after nothing between
    words and their letters backwards; one to continue."""
    rows = []
    for number, line in enumerate((data / "test.jsonl").read_text().splitlines()[:24]):
        words = json.loads(line)["text"].split()
        choices = [" " + " ".join(words[6:10]), " " + " ".join(words[9:5:-1])]
        order, spelled = (-1) ** number, [choices[0], " " + choices[0][:0:-1]]
        row = {"question": " ".join(words[:6]), "choices": choices[::order], "spelled": spelled[::order]}
        rows.append({**row, "answer": number % 2})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    limit = 'generation_kwargs: {until: ["."], max_gen_toks: 4}'
    for name, text, kind, target, metric, more in (
        ("chosen", "{{question}}", "multiple_choice", "answer", "acc", 'doc_to_choice: "{{choices}}"'),
        ("unprompted", "", "multiple_choice", "answer", "acc", 'doc_to_choice: "{{spelled}}"'),
        ("continued", "{{question}}", "generate_until", "choices[answer]", "exact_match", limit),
    ):
        values = {"name": name, "text": text, "kind": kind, "target": target, "metric": metric, "more": more}
        (folder / f"{name}.yaml").write_text(TASK.format(**values, rows=folder / "rows.jsonl"))


@pytest.mark.parametrize("framework", ["mlx", "torch"])
def test_base_and_trained_weights_are_scored(framework: str, tmp_path: Path) -> None:
    model, data = made_demo() / "model", made_demo() / "data"
    values = {"python": FOREIGN, "framework": framework, "model": model, "data": data}
    (tmp_path / "flightdeck.toml").write_text(CONFIG.format(**values))
    make_tasks(tmp_path, data)
    flightdeck(tmp_path, "launch", "--follow", "--accept")
    chosen = ("--tasks", "chosen,unprompted,continued", "--include-path", str(tmp_path), "--limit", "20")
    scores = json.loads(flightdeck(tmp_path, "eval", *chosen, "--json"))["task_results"]
    measured = {(score["variant"], score["task"], score["metric"]): score["value"] for score in scores}
    places = [("chosen", "acc"), ("unprompted", "acc"), ("continued", "exact_match")]
    assert [*measured] == [(variant, *place) for variant in ("base", "adapter") for place in places]
    assert measured["adapter", "chosen", "acc"] > measured["base", "chosen", "acc"]
    assert measured["adapter", "unprompted", "acc"] > 0.9
