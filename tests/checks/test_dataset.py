"""data_matches reads JSONL as mlx-lm does; the commands that it prints really fix the files."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checks import dataset as check
from engine.checks.context import CheckContext
from engine.checks.dataset import inspect_data
from engine.cluster.probe_results import NodeCopies
from engine.config.models import Config, DataConfig, on_node
from engine.models import CheckResult, CheckStatus
from engine.node.probes import dataset
from tests.checks.conftest import make_config, run_check
from tests.demo_copies import made_demo

pytestmark = pytest.mark.usefixtures("shared_agent")

KEYS = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}


def apply(result: CheckResult) -> None:
    failed = refused(result)
    assert failed is None, failed


def refused(result: CheckResult) -> str | None:
    """What the fix says when it fails."""
    assert result.fix_command is not None
    finished = subprocess.run(result.fix_command, shell=True, check=False, capture_output=True, text=True)
    return finished.stderr if finished.returncode else None


def corrected(config: Config, data: Path) -> Config:
    """What a person writes after the fix."""
    job = config.job.model_copy(update={"data": f"{data}-corrected"})
    nodes = tuple(node.model_copy(update={"data": None}) for node in config.nodes)
    return config.model_copy(update={"job": job, "nodes": nodes})


async def test_good_data_passes_with_its_line_counts(config: Config) -> None:
    result = await run_check(check.run, config)
    assert (result.status, result.summary) == (CheckStatus.PASS, "train 40, valid 4 examples, text")


def reported(config: Config, folder: Path, **report: object) -> Config:
    """The configuration with a data quality report beside it."""
    (folder / "report.json").write_text(json.dumps(report))
    job = config.job.model_copy(update={"data_quality_report": str(folder / "report.json")})
    return config.model_copy(update={"job": job, "file": folder / "flightdeck.toml"})


async def test_poisoned_data_fails_whatever_other_check_is_skipped(config: Config, tmp_path: Path) -> None:
    poisoned = reported(config, tmp_path, poisoning_detected=True)
    result = await run_check(check.run, poisoned)
    assert (result.status, result.fix_command) == (CheckStatus.FAIL, None)
    assert result.summary.startswith(
        "the data report says poisoning_detected: true: clean the data, then make a new report"
    )
    own = poisoned.job.model_copy(update={"command": ("python", "train.py")})
    command = poisoned.model_copy(update={"job": own})
    assert check.CHECK.not_applicable(command) is None
    assert (await run_check(check.run, command)).status is CheckStatus.FAIL


async def test_a_report_that_is_not_ready_or_cannot_be_read_warns(config: Config, tmp_path: Path) -> None:
    doubtful = await run_check(check.run, reported(config, tmp_path, overall_ready=False, recommendations=["dedupe"]))
    assert (doubtful.status, "overall_ready: false: dedupe" in doubtful.summary) == (CheckStatus.WARN, True)
    sound = reported(config, tmp_path, overall_ready=True)
    assert (await run_check(check.run, sound)).status is CheckStatus.PASS
    (tmp_path / "report.json").write_text("{")
    unread = await run_check(check.run, sound)
    assert (unread.status, "the data report is invalid" in unread.summary) == (CheckStatus.WARN, True)


@pytest.mark.parametrize("bad", ["{not json", '{"txt": "other key"}', "[1, 2]", '{"text": 7}'])
async def test_a_bad_line_is_shown_and_its_fix_writes_a_copy_without_it(config: Config, data: Path, bad: str) -> None:
    train = data / "train.jsonl"
    lines = train.read_text().splitlines()
    train.write_text("\n".join([*lines[:6], bad, *lines[6:]]) + "\n")
    before = {file.name: file.read_bytes() for file in data.iterdir()}
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.FAIL
    assert f"{train}: line 7 " in result.summary
    assert f'then set data = "{data}-corrected"' in result.summary
    assert bad in result.evidence["node0"]
    assert f'"${{EDITOR:-vi}}" +7 {train}' in result.evidence["node0"]
    apply(result)
    assert {file.name: file.read_bytes() for file in data.iterdir()} == before
    assert Path(f"{data}-corrected/train.jsonl").read_text().splitlines() == lines
    assert (await run_check(check.run, corrected(config, data))).status is CheckStatus.PASS


async def test_the_fix_of_bad_lines_overwrites_no_folder(config: Config, data: Path) -> None:
    with (data / "train.jsonl").open("a") as file:
        file.write("{bad\n")
    own = Path(f"{data}-corrected")
    own.mkdir()
    (own / "train.jsonl").write_text("mine\n")
    result = await run_check(check.run, config)
    assert "File exists" in (refused(result) or "")
    assert (own / "train.jsonl").read_text() == "mine\n"


async def test_bad_lines_with_no_validation_data_beside_them_are_corrected_first(config: Config, data: Path) -> None:
    (data / "valid.jsonl").unlink()
    with (data / "train.jsonl").open("a") as file:
        file.write("{bad\n")
    apply(await run_check(check.run, config))
    result = await run_check(check.run, corrected(config, data))
    assert (result.status, "valid.jsonl is missing" in result.summary) == (CheckStatus.WARN, True)


async def test_an_empty_file_that_no_copy_corrects_has_no_fix(config: Config, data: Path) -> None:
    (data / "train.jsonl").write_text("")
    assert (await run_check(check.run, config)).fix_command is None


async def test_a_line_of_another_form_than_the_first_is_a_fault(config: Config, data: Path) -> None:
    with (data / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    result = await run_check(check.run, config)
    assert "line 41 has no text, as the first line has" in result.summary


async def test_missing_validation_only_warns_and_data_valid_splits_it_off(config: Config, data: Path) -> None:
    (data / "valid.jsonl").unlink()
    result = await run_check(check.run, config)
    assert (result.status, result.fix_command) == (CheckStatus.WARN, None)
    assert "valid.jsonl is missing" in result.summary and "[data] valid = 0.05 splits it off" in result.summary
    chosen = config.model_copy(update={"data": DataConfig(valid=0.25)})
    assert (await run_check(check.run, chosen)).status is CheckStatus.PASS


@pytest.mark.parametrize("keys", [{"patience": 2}, {"save_best": True}])
async def test_missing_validation_blocks_a_job_that_needs_it(
    model: Path, data: Path, tmp_path: Path, keys: dict[str, object]
) -> None:
    (data / "valid.jsonl").unlink()
    config = make_config(model, data, tmp_path, settings=keys)
    result = await run_check(check.run, config)
    assert (result.status, f"and {next(iter(keys))} needs it" in result.summary) == (CheckStatus.FAIL, True)
    chosen = config.model_copy(update={"data": DataConfig(valid=0.25)})
    assert (await run_check(check.run, chosen)).status is CheckStatus.PASS


async def test_validation_data_is_not_required_when_there_is_none(model: Path, data: Path, tmp_path: Path) -> None:
    (data / "valid.jsonl").unlink()
    config = make_config(model, data, tmp_path, settings={"val_batches": 0})
    result = await run_check(check.run, config)
    assert (result.status, result.summary) == (CheckStatus.PASS, "train 40 examples, text")
    (data / "train.jsonl").write_text('{"text": "alone"}\n')
    config = make_config(model, data, tmp_path, settings={"val_batches": 0, "batch_size": 1})
    assert (await run_check(check.run, config)).summary == "train 1 example, text"
    # A rank reads it all the same.
    (data / "valid.jsonl").write_text("{bad\n")
    assert (await run_check(check.run, config)).status is CheckStatus.FAIL


async def test_a_missing_test_set_blocks_a_job_that_tests(model: Path, data: Path, tmp_path: Path) -> None:
    result = await run_check(check.run, make_config(model, data, tmp_path, settings={"test": True}))
    assert result.status is CheckStatus.FAIL
    assert "test.jsonl is missing" in result.summary


async def test_an_empty_training_file_blocks(config: Config, data: Path) -> None:
    (data / "train.jsonl").write_text("")
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.FAIL
    assert "train.jsonl is empty" in result.summary


async def test_masking_prompts_needs_prompts(model: Path, data: Path, tmp_path: Path) -> None:
    result = await run_check(check.run, make_config(model, data, tmp_path, settings={"mask_prompt": True}))
    assert "mask_prompt" in result.summary


@pytest.mark.parametrize("line", ['{"text": "one more"}', "{bad"])
async def test_other_data_on_another_node_is_named_and_its_fix_copies_it_and_keeps_what_was_there(
    config: Config, data: Path, tmp_path: Path, line: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    (copy / "test.jsonl").write_text("a person's own")
    (data / "test.jsonl").write_text("not for this job")
    with (copy / "train.jsonl").open("a") as file:
        file.write(f"{line}\n")
    before = (copy / "train.jsonl").read_text()
    nodes = (config.nodes[0], config.nodes[1].model_copy(update={"data": str(copy)}))
    changed = config.model_copy(update={"nodes": nodes})
    result = await run_check(check.run, changed)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    apply(result)
    assert (await run_check(check.run, changed)).status is CheckStatus.PASS
    assert [file.read_text() for file in copy.glob("train.jsonl.aside-*")] == [before]
    assert (copy / "test.jsonl").read_text() == "a person's own"


@pytest.mark.needs("linux")
async def test_a_file_that_cannot_be_read_is_moved_aside_for_its_copy(
    config: Config, data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    (copy / "train.jsonl").unlink()
    (copy / "train.jsonl").symlink_to("/proc/self/mem")
    nodes = (config.nodes[0], config.nodes[1].model_copy(update={"data": str(copy)}))
    changed = config.model_copy(update={"nodes": nodes})
    result = await run_check(check.run, changed)
    assert "train.jsonl cannot be read" in result.summary
    apply(result)
    assert (await run_check(check.run, changed)).status is CheckStatus.PASS
    assert (copy / "train.jsonl.aside-unread").is_symlink()


def test_a_byte_order_mark_is_read_and_invalid_utf8_is_a_fault_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xff"}\n{"text": "b\xc3\xa9"}\n')
    summary = dataset.read_lines(path, KEYS)
    assert [number for number, _ in summary["faults"]] == [2]
    assert summary["foreign"] is None, "some lines are UTF-8, so that another encoding would garble those"


async def test_a_file_with_a_byte_order_mark_passes_whole(config: Config, data: Path) -> None:
    train = data / "train.jsonl"
    train.write_bytes(b"\xef\xbb\xbf" + train.read_bytes())
    result = await run_check(check.run, config)
    assert (result.status, result.summary) == (CheckStatus.PASS, "train 40, valid 4 examples, text")


async def test_train_jsonl_named_as_data_is_its_folder(config: Config, data: Path) -> None:
    job = config.job.model_copy(update={"data": str(data / "train.jsonl")})
    result = await run_check(check.run, config.model_copy(update={"job": job}))
    assert (result.status, result.summary) == (CheckStatus.PASS, "train 40, valid 4 examples, text")


async def test_data_of_another_kind_is_said_with_its_shape_and_what_is_not_read(config: Config, data: Path) -> None:
    rows = [{"story": f"level {number}", "id": number} for number in range(100)]
    (data / "train.jsonl").write_text(json.dumps([*rows, {"story": " ", "id": 0}]), encoding="utf-16")
    (data / "valid.jsonl").unlink()
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.WARN
    assert f"1 row left out, without text (first: {data}/train.jsonl: row 101)" in result.summary
    assert "1 file of text; 5.0% split off as valid; not read: id" in result.evidence["node0"]
    chosen = config.model_copy(update={"data": DataConfig(valid=0.2)})
    (data / "train.jsonl").write_text(json.dumps(rows))
    result = await run_check(check.run, chosen)
    valid = int(result.summary.split("valid ")[1].split()[0])
    expected = f"train {100 - valid}, valid {valid} examples, text, from 1 file of text; 20.0% split off as valid"
    assert (result.summary, 10 <= valid <= 30) == (f"{expected}; not read: id", True)


async def test_named_rows_without_validation_are_split_no_further(config: Config, tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\n" + "".join(f"{row}?,b\n" for row in range(90)))
    nodes = tuple(node.model_copy(update={"data": str(tmp_path / "qa.csv")}) for node in config.nodes)
    named = config.model_copy(update={"nodes": nodes, "data": DataConfig(splits={"train": "train[:80%]"})})
    result = await run_check(check.run, named)
    assert result.status is CheckStatus.WARN
    assert "valid.jsonl is missing" in result.summary and "[data] valid = 0.05 splits it off" in result.summary
    chosen = named.model_copy(update={"data": named.data.model_copy(update={"valid": 0.25})})
    result = await run_check(check.run, chosen)
    assert "is missing" not in result.summary and "25.0% split off as valid" in result.evidence["node0"], result.summary


async def test_data_that_cannot_be_read_is_told_once(config: Config, tmp_path: Path) -> None:
    source = tmp_path / "abc.csv"
    source.write_text("a,b,c\n" + "1,2,3\n" * 9)
    nodes = tuple(node.model_copy(update={"data": str(source)}) for node in config.nodes)
    for why in (f"{source}: line 2 has a shape that is not known", f"there is no {source}"):
        result = await run_check(check.run, config.model_copy(update={"nodes": nodes}))
        assert result.status is CheckStatus.FAIL and result.summary.startswith(why)
        assert {*result.evidence.values()} == {result.summary}
        source.unlink(missing_ok=True)


async def test_a_split_that_gets_no_row_is_said(config: Config, tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\n" + "".join(f"{row}?,b\n" for row in range(9)))
    nodes = tuple(node.model_copy(update={"data": str(tmp_path / "qa.csv")}) for node in config.nodes)
    few = config.model_copy(update={"nodes": nodes, "data": DataConfig(valid=1e-9)})
    result = await run_check(check.run, few)
    assert result.status is CheckStatus.WARN
    assert "no row is in valid: 0.0% of 9 rows is none" in result.summary
    assert "splits it off" not in result.summary


async def test_large_data_is_refused_with_the_command_that_converts_it_on_each_node(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\na?,b\nc?,d\n")
    (tmp_path / "bad.csv").write_text("question,answer\na?\n")
    paths = [str(tmp_path / name) for name in ("qa.csv", "bad.csv")]
    nodes = tuple(
        node.model_copy(update={"data": path, "model": None}) for node, path in zip(config.nodes, paths, strict=True)
    )
    unmodelled = config.job.model_copy(update={"model": None})
    large = config.model_copy(update={"nodes": nodes, "job": unmodelled, "data": DataConfig(valid=0)})
    monkeypatch.setattr(check, "_READ_LIMIT_S", 1e-6)
    result = await run_check(check.run, large)
    assert result.status is CheckStatus.FAIL
    assert "`flightdeck data` takes the time to convert large data on each node, once" in result.summary
    inspected = []

    async def inspect(context: CheckContext) -> CheckResult:
        inspected.append(await inspect_data(context, 1))
        return result

    await run_check(inspect, large)
    assert inspected[0].faults == () and inspected[0].files["train"].examples == 2
    expected = f"not converted on node1: {paths[1]}: line 2 has 1 fields, and the header has 2"
    assert inspected[0].warnings == (expected,)


@pytest.mark.parametrize(("problem", "warning"), [
    (None, "no tokens are counted: org/tiny is not on node0 yet: a launch brings it there"),
    ("its disk answers no more", "no tokens are counted: its disk answers no more"),
])  # fmt: skip
async def test_a_model_that_is_not_there_is_not_one_that_could_not_be_looked_for(
    config: Config, monkeypatch: pytest.MonkeyPatch, problem: str | None, warning: str
) -> None:
    async def copies_of(*_: object) -> NodeCopies:
        return NodeCopies(cache="/hub", free_bytes=0, copies=(), problem=problem)

    monkeypatch.setattr(check, "copies_of", copies_of)
    job = config.job.model_copy(update={"model": "org/tiny"})
    nodes = [node.model_copy(update={"model": on_node("org/tiny", node, config.folder)}) for node in config.nodes]
    inspected = []

    async def inspect(context: CheckContext) -> CheckResult:
        inspected.append(await inspect_data(context, 1))
        return CheckResult(name=check.NAME, status=CheckStatus.PASS, summary="")

    await run_check(inspect, config.model_copy(update={"job": job, "nodes": tuple(nodes)}))
    assert inspected[0].warnings == (warning,) and inspected[0].files["train"].examples == 40


@pytest.mark.usefixtures("tried_here")
async def test_rows_of_named_columns_are_tried_as_they_are_read(templated: Path, tmp_path: Path) -> None:
    source = tmp_path / "qa.tsv"
    source.write_text("Q\tA\n" + "".join(f"level {row}?\tthree {row}\n" for row in range(40)))
    config = make_config(templated, source, tmp_path, settings={"batch_size": 2, "mask_prompt": True})
    refused = await run_check(check.run, config)
    assert f"{source}: line 2 has a shape that is not known: it has Q, A; say what they are" in refused.summary
    chosen = config.model_copy(update={"data": DataConfig(columns={"prompt": "Q", "completion": "A"}, valid=0.2)})
    result = await run_check(check.run, chosen)
    assert result.status is CheckStatus.PASS, result.summary
    assert "examples, chat, from 1 file of completions" in result.summary


async def test_other_data_of_another_kind_on_another_node_is_copied_whole(
    config: Config, tmp_path: Path, home: Path
) -> None:
    sources = [tmp_path / name / "qa.csv" for name in ("one", "two")]
    for number, source in enumerate(sources):
        source.parent.mkdir()
        source.write_text("question,answer\n" + "".join(f"{row}?,{number}\n" for row in range(40)))
    nodes = tuple(
        node.model_copy(update={"data": str(source)}) for node, source in zip(config.nodes, sources, strict=True)
    )
    changed = config.model_copy(update={"nodes": nodes})
    result = await run_check(check.run, changed)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert "the data on node1 differs from node0: train.jsonl" in result.summary
    apply(result)
    assert (await run_check(check.run, changed)).status is not CheckStatus.FAIL
    assert sources[0].read_bytes() == sources[1].read_bytes()
    assert [file.read_text()[-3:] for file in sources[1].parent.glob("qa.csv.aside-*")] == [",1\n"]
    sources[1].unlink()
    apply(await run_check(check.run, changed))
    assert sources[0].read_bytes() == sources[1].read_bytes()
    sources[1].write_text("question,answer\n1\n")
    result = await run_check(check.run, changed)
    assert f"{sources[1]}: line 2 has 1 fields, and the header has 2" in result.summary
    apply(result)
    assert (await run_check(check.run, changed)).status is not CheckStatus.FAIL


async def test_lines_that_end_in_cr_alone_are_read_as_lines(config: Config, data: Path) -> None:
    train = data / "train.jsonl"
    lines = train.read_text().splitlines()
    train.write_bytes("\r".join(lines).encode())
    assert (await run_check(check.run, config)).summary == "train 40, valid 4 examples, text"
    train.write_bytes("\r".join([*lines[:6], "{bad\x1b[2J", *lines[6:]]).encode())
    result = await run_check(check.run, config)
    assert "line 7 is no JSON" in result.summary and result.summary.isprintable()
    apply(result)
    assert Path(f"{data}-corrected/train.jsonl").read_text().splitlines() == train.read_text().splitlines()


@pytest.mark.usefixtures("tried_here")
async def test_rows_that_teach_little_are_counted(templated: Path, data: Path, tmp_path: Path) -> None:
    rows = [chat("user", "assistant"), chat("user", "assistant", "user"), chat("user", "assistant")]
    weighted = chat("user", "assistant", "user", "assistant")
    weighted["messages"][1]["weight"] = 0
    for name, written in (("train", [*rows, weighted]), ("valid", rows[:1])):
        (data / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in written))
    config = make_config(templated, data, tmp_path, settings={"batch_size": 1, "mask_prompt": True})
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.WARN
    for count in (
        "train.jsonl: 1 of 4 rows (first: line 4) with a `weight` on messages, which is not read: all are trained on",
        "train.jsonl: 1 of 4 rows (first: line 2) not ending with an assistant's message",
        "train.jsonl: 1 of 4 rows (first: line 3) repeated in the file",
        "valid.jsonl: 1 of 1 row (first: line 1) also in train.jsonl",
    ):
        assert count in result.summary, result.summary


@pytest.mark.usefixtures("tried_here")
async def test_a_job_without_any_target_is_refused(templated: Path, data: Path, tmp_path: Path) -> None:
    for name in ("train", "valid"):
        rows = [{"prompt": "report the level " * 9, "completion": f"{name} {number}"} for number in range(4)]
        (data / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings: dict[str, object] = {"mask_prompt": True, "max_seq_length": 8}
    result = await run_check(check.run, make_config(templated, data, tmp_path, settings=settings))
    assert result.status is CheckStatus.FAIL
    assert "train.jsonl: 4 of 4 rows (first: line 1) without a target, so that nothing is learned" in result.summary


@given(form=st.sampled_from(["text", "chat", "completions"]), n=st.integers(1, 30))
def test_each_of_the_three_forms_is_recognised(tmp_path_factory: pytest.TempPathFactory, form: str, n: int) -> None:
    samples = {
        "text": {"text": "a"},
        "chat": {"messages": [{"role": "user", "content": "a"}]},
        "completions": {"prompt": "a", "completion": "b"},
    }
    path = tmp_path_factory.mktemp("forms") / "x.jsonl"
    path.write_text((json.dumps(samples[form]) + "\n") * n)
    summary = dataset.read_lines(path, KEYS)
    assert (summary["form"], summary["lines"], summary["faults"]) == (form, n, [])


ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


def chat(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"said by {role}"} for role in roles]}


@pytest.fixture
def templated(tmp_path: Path) -> Path:
    """A model whose tokenizer has a template that takes user and assistant in turns."""
    folder = tmp_path / "templated"
    shutil.copytree(made_demo() / "model", folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": ALTERNATING}))
    return folder


async def test_rows_that_the_chat_template_refuses_block_with_their_line(
    templated: Path, data: Path, tmp_path: Path
) -> None:
    config = make_config(templated, data, tmp_path)
    for name in ("train", "valid"):
        good = [{**chat("user", "assistant"), "tools": [{"name": f"{name} {number}"}]} for number in range(8)]
        (data / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in good))
    assert (await run_check(check.run, config)).status is CheckStatus.PASS
    bad = [chat("user", "user"), chat("system", "user"), chat("user", "user")]
    with (data / "train.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in bad)
    result = await run_check(check.run, config)
    assert (result.status, result.fix_command) == (CheckStatus.FAIL, None)
    assert f"{data}/train.jsonl: line 9 is refused by the model's chat template" in result.summary
    assert "(Conversation roles must alternate user/assistant), and 2 more lines: change them" in result.summary


@pytest.mark.usefixtures("tried_here")
async def test_a_tokenizer_without_a_chat_template_takes_no_prompts(
    templated: Path, data: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((templated / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (templated / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("train", "valid"):
        (data / f"{name}.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n" * 4)
    result = await run_check(check.run, make_config(templated, data, tmp_path, settings={"batch_size": 1}))
    assert (result.status, "chat_template is not set" in result.summary) == (CheckStatus.FAIL, True)


@pytest.mark.usefixtures("tried_here")
async def test_rows_that_cannot_be_tried_warn_with_the_reason(config: Config, model: Path, data: Path) -> None:
    for name in ("train", "valid"):
        (data / f"{name}.jsonl").write_text(f"{json.dumps(chat('user', 'assistant'))}\n" * 4)
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.WARN and f"{model} on node0" in result.summary
    assert "the chat template was not tried" in result.summary
