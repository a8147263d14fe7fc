"""Settings of a job: read from texts, checked as the file's own, written into the file, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.edit import changed_keys, edited_settings, with_settings, write_settings
from engine.config.load import load_config
from engine.config.models import Config
from engine.config.overrides import parse_settings
from engine.config.sources import line_of
from engine.errors import ConfigError, InputError

FILE = """# ours
[[node]]
[job]  # the training
model = "m"   # on every node
data = "d"
batch_size = 6 # of two nodes

[job.lora_parameters]
rank = 4

# the end
[ui]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (path := tmp_path / "flightdeck.toml").write_text(FILE)
    return path


def test_settings_are_written_where_they_are_and_all_else_stays(path: Path) -> None:
    path.chmod(0o600)
    schedule = {"name": "linear_schedule", "arguments": [2e-05, 2e-05, 250], "warmup": 13}
    line = 'lr_schedule = {name = "linear_schedule", arguments = [2e-05, 2e-05, 250], warmup = 13}'
    for _ in range(2):
        changes = {"batch_size": 8, "learning_rate": 2e-05, "lr_schedule": schedule, "lora_parameters.rank": 16}
        kept = write_settings(load_config(path), changes, backup=True)
        added = f"batch_size = 8 # of two nodes\nlearning_rate = 2e-05\n{line}\n"
        text = FILE.replace("batch_size = 6 # of two nodes\n", added).replace("rank = 4", "rank = 16")
        assert path.read_text() == text, "set again, it is the same"
    assert load_config(path).job.mlx_lm["lora_parameters"]["rank"] == 16
    assert kept is not None and path.stat().st_mode & 0o777 == kept.stat().st_mode & 0o777 == 0o600
    assert kept == path.with_name("flightdeck.toml.bak-2")
    assert path.with_name("flightdeck.toml.bak").read_text() == FILE, "the first way back is kept"


def test_line_ends_a_byte_order_mark_and_separators_within_a_line_stay(path: Path) -> None:
    odd = FILE.replace("the end", "the\u2028end\x85of it")
    path.write_bytes(b"\xef\xbb\xbf" + odd.replace("\n", "\r\n").encode())
    before = path.read_bytes()
    kept = write_settings(load_config(path), {"batch_size": 8, "ui.ascii": True}, backup=True)
    assert kept is not None and kept.read_bytes() == before
    assert path.read_bytes() == before.replace(b"batch_size = 6", b"batch_size = 8") + b"ascii = true\r\n"
    assert line_of(path, "ui.ascii") == (13, "ascii = true")


def test_keys_of_other_tables_are_written_too_but_not_a_nodes(path: Path) -> None:
    write_settings(load_config(path), {"checkpoint.every": 7, "ui.ascii": True, "job.seed": 3})
    config = load_config(path)
    assert (config.checkpoint.every, config.ui.ascii, config.job.mlx_lm["seed"]) == (7, True, 3)
    assert path.read_text().endswith("[ui]\nascii = true\n\n[checkpoint]\nevery = 7\n")
    with pytest.raises(InputError, match=r"node\.node0\.python cannot be written"):
        write_settings(config, {"node.node0.python": "/x"})


def test_one_key_of_a_table_that_only_the_yaml_has_is_written_with_the_others(path: Path) -> None:
    path.write_text('[[node]]\n[job]\nconfig = "lora.yaml"\nmodel = "m"\ndata = "d"\n')
    (path.parent / "lora.yaml").write_text("lora_parameters: {rank: 4, scale: 7.0, dropout: 0.0}\nepochs: 2\n")
    write_settings(load_config(path), {"lora_parameters.rank": 16, "iters": 50})
    job = load_config(path).job.mlx_lm
    assert job["lora_parameters"] == {"rank": 16, "scale": 7.0, "dropout": 0.0}
    assert (job["iters"], job.get("epochs")) == (50, None)
    assert [file.name for file in sorted(path.parent.iterdir())] == ["flightdeck.toml", "lora.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        'node = [{}]\njob = {model = "m", data = "d"}\n',
        '[[node]]\n[job]\nmodel = "m"\ndata = """\nbatch_size = 3\n"""\n',
    ],
    ids=["a table in one line", "a key within a text"],
)
def test_an_unusual_file_is_left_as_it_is_with_the_lines_to_write(path: Path, text: str) -> None:
    config = load_config(path)
    path.write_text(text)
    with pytest.raises(InputError, match=r"write into \[job\]: batch_size = 8"):
        write_settings(config, {"batch_size": 8})
    assert path.read_text() == text and [file.name for file in path.parent.iterdir()] == [path.name]


def job(path: Path, keys: str = "") -> Config:
    path.write_text(FILE.replace("# of two nodes", f"\n{keys}"))
    return load_config(path)


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["learning_rate=1e-5", "batch_size=8"], {"learning_rate": 1e-5, "batch_size": 8}),
        (["fine_tune_type=dora", "lora_parameters.rank = 8"], {"lora_parameters.rank": 8}),
        (["fine_tune_type=full"], {"lora_parameters.rank": None}),
        (["epochs=2"], {"epochs": 2, "iters": None}),
        (["batch_tokens=512"], {"batch_tokens": 512, "batch_size": None}),
    ],
)
def test_other_settings_are_those_that_the_file_would_have(
    path: Path, texts: list[str], values: dict[str, Any]
) -> None:
    changed = with_settings(job(path), parse_settings(texts), "--set")
    assert {key: edited_settings(changed).get(key) for key in values} == values
    write_settings(load_config(path), parse_settings(texts))
    assert changed_keys(changed, load_config(path)) == []


def test_a_rate_by_rule_follows_the_batch(path: Path) -> None:
    config = job(path, 'learning_rate = "auto"')
    four = with_settings(config, {"batch_size": 24}, "--set")
    assert edited_settings(four)["learning_rate"] == 2 * edited_settings(config)["learning_rate"]
    fixed = with_settings(config, {"batch_size": 24, "learning_rate": 0.5}, "--set")
    assert edited_settings(fixed)["learning_rate"] == 0.5


def test_all_faults_are_named_and_nothing_is_changed(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        with_settings(job(path), parse_settings(["batch_size=0", "lerning_rate=1", "data=x"]), "--set")
    assert str(caught.value).splitlines() == [
        "--set: job.data = 'x': expected no value here: change it in the file",
        "--set: job.lerning_rate = 1: expected a known key; did you mean learning_rate?",
        "--set: job.batch_size = 0: expected a whole number, 1 or more",
    ]
    with pytest.raises(ConfigError, match="grad_accumulation_steps = 900: expected at most iters = 10"):
        with_settings(job(path), {"iters": 10, "grad_accumulation_steps": 900}, "--set")
    with pytest.raises(InputError, match="'rank' is no setting"):
        parse_settings(["rank"])


def test_other_tables_change_and_the_nodes_stay(path: Path) -> None:
    path.write_text(FILE.replace("[[node]]\n", '[[node]]\nname = "a"\nprocesses = 2\nips = ["127.0.0.1"]\n'))
    config = load_config(path)
    changed = with_settings(config, {"checkpoint.every": 2, "strategy": "sharded", "name": "again"}, "--set")
    assert (changed.checkpoint.every, changed.job.strategy, changed.job.name) == (2, "sharded", "again")
    assert changed.nodes == config.nodes and changed.job.mlx_lm == config.job.mlx_lm
    with pytest.raises(ConfigError, match=r"^--set: node\.a\.python = '/x': expected no value here"):
        with_settings(config, {"node.a.python": "/x"}, "--set")


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000, "2026-13-01"], ids=["brackets", "digits", "date"])
def test_a_value_that_toml_cannot_read_is_a_text(value: str) -> None:
    assert parse_settings([f"seed={value}"]) == {"seed": value}


def test_a_commands_settings_are_its_own(path: Path) -> None:
    path.write_text('[[node]]\n[job]\ncommand = ["true"]\n')
    with pytest.raises(ConfigError, match="the command has its own settings"):
        with_settings(load_config(path), {"iters": 10}, "--set")


def test_what_differs_is_named_by_key_and_a_secret_never_shown(path: Path) -> None:
    before = job(path)
    after = job(path, 'learning_rate = 1e-4\nenv = { TOKEN = "hf_secret" }\n')
    assert changed_keys(before, after) == ["learning_rate 1e-05 → 0.0001", "env.TOKEN"]
    assert changed_keys(before, before) == []


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("job.batch_size", 6),
        ("job.lora_parameters.rank", 9),
        ("line 4", 4),
        ("node[0].python", None),
        ("job.data[0]", 5),
        ("line 99", None),
    ],
)
def test_a_fault_is_found_in_the_file(path: Path, key: str, line: int | None) -> None:
    found = line_of(path, key)
    assert found == (None if line is None else (line, FILE.splitlines()[line - 1]))
