"""model_present finds what a load would stumble over, and names it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.checks import model_files as check
from engine.checks.fixes import as_shell_line
from engine.config.models import Config
from engine.models import CheckResult, CheckStatus
from tests.bench.memory_step import write_weights
from tests.bench.tiny_models import tiny_config
from tests.checks.conftest import run_check, run_fix

pytestmark = pytest.mark.usefixtures("shared_agent")


async def test_a_whole_model_passes_with_its_size(config: Config) -> None:
    result = await run_check(check.run, config)
    assert (result.status, result.summary) == (CheckStatus.PASS, "llama, 1 shard, 2.7 kB")
    assert set(result.evidence) == {"node0", "node1"}


async def test_a_missing_directory_names_the_one_that_was_meant(config: Config, model: Path) -> None:
    shutil.move(model, model.with_name("models"))
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.FAIL
    assert f"did you mean {model.with_name('models')}?" in result.summary
    assert result.blames == (0, "node0")


async def test_every_missing_part_is_named_at_once(config: Config, model: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).unlink()
    result = await run_check(check.run, config)
    for part in ("config.json is missing", "no tokenizer", "no weights"):
        assert part in result.summary


async def test_shards_that_the_index_names_must_be_there(config: Config, model: Path) -> None:
    weights = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    result = await run_check(check.run, config)
    assert "1 of 2 shards missing: model-2.safetensors" in result.summary


async def test_a_model_that_names_its_origin_comes_with_the_download_command(config: Config, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "_name_or_path": "org/tiny"}))
    (model / "model.safetensors").unlink()
    result = await run_check(check.run, config)
    # Beside it: the origin is often another model, say of more bits, whose files would replace these.
    assert f"d={model}-downloaded; " in (result.fix_command or "")
    assert f'then set model = "{model}-downloaded"' in result.summary
    assert asks_for_login_shell(config, result), "hf is on its PATH only"


def asks_for_login_shell(config: Config, result: CheckResult) -> bool:
    remote = config.nodes[0].model_copy(update={"ssh": "mac"})
    line = as_shell_line(config.model_copy(update={"nodes": (remote,)}), {remote.name: result.fixes[remote.name]})
    return '"$SHELL" -lc' in (line or "")


async def test_a_download_is_resumed_and_never_put_into_a_folder_of_something_else(
    config: Config, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "_name_or_path": "org/tiny"}))
    (model / "model.safetensors").unlink()
    command = (await run_check(check.run, config)).fixes["node0"]
    target, hf = Path(f"{model}-downloaded"), tmp_path / "programs" / "hf"
    hf.parent.mkdir()
    hf.write_text('#!/bin/sh\necho "$@" >>"$0.called"; mkdir -p "$4/.cache/huggingface"; exit 1\n')
    hf.chmod(0o755)
    monkeypatch.setenv("PATH", f"{hf.parent}:{os.environ['PATH']}")

    def calls() -> int:
        assert subprocess.run(command, shell=True, check=False, capture_output=True).returncode == 1
        log = hf.with_name("hf.called")
        return log.read_text().count(f"download org/tiny --local-dir {target}\n") if log.exists() else 0

    target.mkdir()
    (target / "config.json").write_text("mine")
    assert calls() == 0
    (target / "config.json").unlink()
    assert (calls(), calls()) == (1, 2)


async def test_a_model_that_another_node_has_is_copied_from_there_and_not_downloaded(
    config: Config, model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "config.json").write_text(json.dumps({"model_type": "llama", "_name_or_path": "org/tiny"}))
    (broken / "model.safetensors").unlink()
    nodes = (config.nodes[0], config.nodes[1].model_copy(update={"model": str(broken)}))
    fixed = config.model_copy(update={"nodes": nodes})
    result = await run_check(check.run, fixed)
    assert (result.blames, result.fixes, "download" in result.summary) == ((1, "node1"), {}, False)
    await run_fix(result.fix_command)
    assert (await run_check(check.run, fixed)).status is CheckStatus.PASS


async def test_only_the_node_whose_copy_is_broken_is_blamed(config: Config, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "config.json").write_text("{")
    nodes = (config.nodes[0], config.nodes[1].model_copy(update={"model": str(copy)}))
    result = await run_check(check.run, config.model_copy(update={"nodes": nodes}))
    assert result.blames == (1, "node1")
    assert "no model configuration" in result.evidence["node1"]


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """A model of that kind with random weights, and a tokenizer of two words: mlx-lm loads both."""
    mx.set_default_device(mx.cpu)
    words = {"type": "WordLevel", "vocab": {"<unk>": 0, "tower": 1}, "unk_token": "<unk>"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    for name, document in (
        ("config.json", {"torch_dtype": "float32", **config}),
        ("tokenizer.json", {"version": "1.0", "added_tokens": [], **parts, "model": words}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}),
    ):
        (directory / name).write_text(json.dumps(document))
    write_weights(directory)


def adapting(config: Config, kind: str, *keys: str) -> Config:
    settings = {**config.job.mlx_lm, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": list(keys)}}
    return config.model_copy(update={"job": config.job.model_copy(update={"fine_tune_type": kind, "mlx_lm": settings})})


async def test_adapters_of_an_architecture_that_the_plan_does_not_know_are_tried_on_a_node(
    config: Config, model: Path
) -> None:
    write_model(model, tiny_config("deepseek_v3"))
    result = await run_check(check.run, adapting(config, "lora", "self_attn.o_proj"))
    assert result.status is CheckStatus.PASS, result.summary


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize(
    ("kind", "key", "expected"),
    [
        (
            "lora",
            "self_attn.q_prj",
            "(self_attn.q_prj) name no matrix of the trained layers, so that nothing is trained",
        ),
        ("dora", "mlp.switch_mlp.up_proj", "mlx-lm cannot adapt the model: SwitchLinear doesn't support DoRA yet"),
    ],
)
async def test_adapters_that_mlx_lm_cannot_make_are_refused_with_the_layers_that_there_are(
    config: Config, model: Path, kind: str, key: str, expected: str
) -> None:
    write_model(model, tiny_config("deepseek_v3"))
    result = await run_check(check.run, adapting(config, kind, key))
    assert result.status is CheckStatus.FAIL and expected in result.summary
    assert "self_attn.o_proj" in result.summary


@pytest.mark.usefixtures("tried_here")
async def test_one_wrong_key_among_right_ones_is_named(config: Config, model: Path) -> None:
    write_model(model, tiny_config("deepseek_v3"))
    result = await run_check(check.run, adapting(config, "lora", "self_attn.o_proj", "self_attn.o_prog"))
    assert result.status is CheckStatus.WARN
    assert "no matrix is called self_attn.o_prog, as lora_parameters.keys says: the trained layers" in result.summary


async def test_adapters_that_cannot_be_tried_warn_with_the_reason(config: Config, model: Path) -> None:
    write_model(model, tiny_config("deepseek_v3"))
    without_mlx = str(Path(sys.base_prefix) / "bin" / "python3")
    nodes = tuple(node.model_copy(update={"python": without_mlx}) for node in config.nodes)
    bare = adapting(config, "lora", "self_attn.o_proj").model_copy(update={"nodes": nodes})
    result = await run_check(check.run, bare, own_agent=True)
    assert result.status is CheckStatus.WARN, result.summary
    assert "adapters were not tried" in result.summary and "No module named 'mlx" in result.summary
