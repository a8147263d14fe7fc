"""worker_consistency compares what the workers run with what this machine has, and says who differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.config.models import FlightConfig
from engine.launch.staging_script import bundle_hash
from engine.models import CheckStatus
from engine.planning.before_launch import own_files
from engine.preflight import consistency as check
from engine.worker.looks import consistency as look
from tests.unit.preflight.conftest import looked, pasted


@pytest.fixture
def script(config: FlightConfig, tmp_path: Path) -> FlightConfig:
    """A command of two files in two workdirs."""
    nodes = []
    for node in config.nodes:
        folder = tmp_path / node.name
        folder.mkdir()
        (folder / "train.py").write_text("print(1)\n")
        (folder / "lora.yaml").write_text("iters: 1\n")
        nodes.append(node.model_copy(update={"workdir": str(folder)}))
    command = ("python", "train.py", "--config", "{workdir}/lora.yaml", "--out", "result.txt", "rank{rank}.json")
    job = config.job.model_copy(update={"command": command})
    return config.model_copy(update={"nodes": tuple(nodes), "job": job})


async def test_workers_of_one_content_agree(config: FlightConfig, script: FlightConfig) -> None:
    for each, items in ((config, 4), (script, 3)):
        result = await looked(check.look, each)
        assert (result.status, result.summary) == (
            CheckStatus.PASS,
            f"2 workers agree with this machine on {items} items",
        ), result
        assert result.detail is not None and result.detail.kind == "worker_consistency"
        assert (result.detail.agreement, result.detail.reference) == (1.0, "head")


async def test_another_script_is_named_with_both_hashes_and_its_fix_mends_it(script: FlightConfig) -> None:
    theirs = Path(script.nodes[1].workdir) / "train.py"
    theirs.write_text("print(2)\n")
    ours, other = look.file_hash(Path(script.nodes[0].workdir) / "train.py"), look.file_hash(theirs)
    result = await looked(check.look, script)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "node1"))
    assert ours is not None and other is not None
    assert f"node1: train.py is {other[:12]}, {ours[:12]} on this machine" in result.summary
    assert "1 of 2 agree, 0.50 against 0.95" in result.summary
    await pasted(result.fix_command)
    assert (await looked(check.look, script)).status is CheckStatus.PASS


async def test_a_missing_settings_file_differs_too(script: FlightConfig) -> None:
    (Path(script.nodes[1].workdir) / "lora.yaml").unlink()
    result = await looked(check.look, script)
    assert "lora.yaml is missing" in result.summary
    await pasted(result.fix_command)
    assert (await looked(check.look, script)).status is CheckStatus.PASS


async def test_another_tokenizer_is_mended_by_the_models_own_files(
    config: FlightConfig, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "tokenizer.json").write_text(json.dumps({"other": 1}))
    nodes = (config.nodes[0], config.nodes[1].model_copy(update={"model": str(copy)}))
    two = config.model_copy(update={"nodes": nodes})
    result = await looked(check.look, two)
    assert "node1: model tokenizer.json is " in result.summary
    await pasted(result.fix_command)
    assert (await looked(check.look, two)).status is CheckStatus.PASS


async def test_a_divergent_minority_is_left_out_when_the_configuration_says_so(script: FlightConfig) -> None:
    (Path(script.nodes[1].workdir) / "train.py").write_text("print(2)\n")
    settings = script.preflight.model_copy(update={"exclude_divergent": True})
    result = await looked(check.look, script.model_copy(update={"preflight": settings}))
    assert (result.status, result.excludes) == (CheckStatus.WARN, ("node1",))
    assert "left out of the launch: node1" in result.summary


def test_outputs_and_files_of_a_rank_are_not_compared(script: FlightConfig) -> None:
    assert own_files(script) == ["train.py", "{workdir}/lora.yaml"]


def test_one_worker_has_nobody_to_agree_with(config: FlightConfig) -> None:
    one = config.model_copy(update={"nodes": config.nodes[:1]})
    assert check.CHECK.not_applicable(one) == "one worker: there is nobody to agree with"
    off = config.preflight.model_copy(update={"consistency": False})
    assert check.CHECK.switched_off(config.model_copy(update={"preflight": off})) is not None


def test_what_this_machine_lacks_is_known_only_where_it_has_the_rest_of_the_model() -> None:
    workers = {"a": {"model vocab.json": "1", "model config.json": "2", "train.py": "3"}}
    assert check.known({"model config.json": "2", "train.py": None}, workers) == {
        "model config.json": "2",
        "model vocab.json": None,
    }
    assert check.known({"worker": "4"}, workers) == {"worker": "4"}


def test_the_worker_is_hashed_as_it_was_when_it_was_staged() -> None:
    assert look.package_hash(look.PACKAGE) == bundle_hash(look.PACKAGE)
