"""Kinds of folders that are no whole model: each is refused before the launch, in words that say what it is, and what
loads is not refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checks import model_files as check
from engine.config.models import Config
from engine.models import CheckResult, CheckStatus
from engine.node.probes import model_files as probe
from engine.node.probes.job import probe_loading
from tests.bench.models_step import with_optional_packages
from tests.bench.tiny_models import model_types, tiny_config
from tests.checks.conftest import run_check
from tests.checks.test_model_files import write_model
from tests.demo_copies import made_demo
from tests.model_files import safetensors

pytestmark = pytest.mark.usefixtures("shared_agent")
WEIGHTS, CONFIG = "model.safetensors", "config.json"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea\nsize 1234567\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole one, which mlx-lm loads."""
    return shutil.copytree(made_demo() / "model", tmp_path / "model")


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def tensors(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def split(model: Path) -> tuple[Path, Path]:
    """Its tensors in two numbered shards, without an index."""
    header, data = tensors(model / WEIGHTS)
    header.pop("__metadata__", None)
    names = sorted(header)
    files = (model / "model-00001-of-00002.safetensors", model / "model-00002-of-00002.safetensors")
    for file, part in zip(files, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True):
        own, at, pieces = {}, 0, []
        for name in part:
            begin, end = header[name]["data_offsets"]
            own[name] = {**header[name], "data_offsets": [at, at + end - begin]}
            at += end - begin
            pieces.append(data[begin:end])
        write(file, own, b"".join(pieces))
    (model / WEIGHTS).unlink()
    return files


def cut(model: Path) -> None:
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size // 2)


def cut_header(model: Path) -> None:
    os.truncate(model / WEIGHTS, 100)


def dangling(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to("../../blobs/4665a5ea")


def dangling_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("../../blobs/4665a5ea")


def pointer(model: Path) -> None:
    (model / WEIGHTS).write_bytes(LFS)


def tokenizer_pointer(model: Path) -> None:
    (model / "tokenizer.json").write_bytes(LFS)


def one_shard(model: Path) -> None:
    split(model)[1].unlink()


def one_shard_of_an_index(model: Path) -> None:
    files = split(model)
    index = {"weight_map": {name: file.name for file in files for name in tensors(file)[0]}}
    (model / probe.INDEX).write_text(json.dumps(index))
    files[0].unlink()


def shard_of_another_download(model: Path) -> None:
    files = split(model)
    index = {"weight_map": {name: file.name for file in files for name in tensors(file)[0]}}
    (model / probe.INDEX).write_text(json.dumps(index))
    shutil.copyfile(files[0], files[1])


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def cut_tokenizer(model: Path) -> None:
    os.truncate(model / "tokenizer.json", 1000)


def vocabulary_alone(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "vocab.json")


def gguf_folder(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()
    (model / "tiny-q4_k_m.gguf").write_bytes(b"GGUF\3\0\0\0")


def gguf_beside_its_configuration(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / "tiny-q4_k_m.gguf").write_bytes(b"GGUF\3\0\0\0")


def gguf_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_bytes(b"GGUF\3\0\0\0")


def a_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_bytes(safetensors({"a": (2,)}))


def link_to_nothing(model: Path) -> None:
    shutil.rmtree(model)
    model.symlink_to("gone")


def pytorch_files(model: Path) -> None:
    (model / WEIGHTS).rename(model / "pytorch_model.bin")


def other_name(model: Path) -> None:
    (model / WEIGHTS).rename(model / "consolidated.safetensors")


def adapter(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()
    (model / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    (model / "adapters.safetensors").write_bytes(safetensors({"a.lora_a": (2, 2)}))


def cache(model: Path) -> None:
    whole = model.rename(model.with_name("whole"))
    shutil.copytree(whole, model / "snapshots" / "0123abcd")
    shutil.copytree(whole, model / "snapshots" / "ffff9999")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123abcd")


def no_such_type(model: Path) -> None:
    change(model / CONFIG, model_type="bert")


def type_in_capitals(model: Path) -> None:
    change(model / CONFIG, model_type="Llama")


def own_code(model: Path) -> None:
    change(model / CONFIG, model_file="modeling_custom.py")
    (model / "modeling_custom.py").write_text("raise SystemExit('it ran')")


def own_tokenizer(model: Path) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    change(model / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map)
    (model / "tokenization_own.py").write_text("raise SystemExit('it ran')")


def another_vocabulary(model: Path) -> None:
    change(model / CONFIG, vocab_size=500)


def another_width(model: Path) -> None:
    change(model / CONFIG, intermediate_size=640)


def a_layer_more(model: Path) -> None:
    change(model / CONFIG, num_hidden_layers=3)


def a_layer_less(model: Path) -> None:
    change(model / CONFIG, num_hidden_layers=1)


def without(model: Path, name: str) -> None:
    header, data = tensors(model / WEIGHTS)
    begin, end = header.pop(name)["data_offsets"]
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [at - (end - begin) for at in entry["data_offsets"]]
    write(model / WEIGHTS, header, data[:begin] + data[end:])


def a_tensor_less(model: Path) -> None:
    without(model, "model.layers.1.mlp.up_proj.weight")


def no_head(model: Path) -> None:
    without(model, "lm_head.weight")


def unknown_format(model: Path) -> None:
    table = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    change(model / CONFIG, quantization_config=table)


def eight_bits(model: Path) -> None:
    change(model / CONFIG, quantization_config={"quant_method": "gptq", "bits": 8})


def tokenizer_of_another_model(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["another"] = 4000
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def end_beyond(model: Path) -> None:
    add_token(model, "<|im_end|>")
    change(model / "tokenizer_config.json", eos_token="<|im_end|>")


def template_beyond(model: Path) -> None:
    add_token(model, "<|im_start|>")
    (model / "chat_template.jinja").write_text("{{ '<|im_start|>' }}")


def add_token(model: Path, content: str) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 384, "content": content})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (cut, "model.safetensors is cut off or damaged (its tensors need "),
    (cut_header, "model.safetensors is cut off or damaged (its header is longer than the file)"),
    (dangling, "model.safetensors is a link to a file that is not there: download it again"),
    (dangling_tokenizer, "tokenizer.json is a link to a file that is not there"),
    (pointer, "model.safetensors is a pointer of Git LFS: `git lfs pull`"),
    (tokenizer_pointer, "tokenizer.json is a pointer of Git LFS"),
    (one_shard, "1 of 2 shards missing: model-00002-of-00002.safetensors"),
    (one_shard_of_an_index, "1 of 2 shards missing: model-00001-of-00002.safetensors"),
    (shard_of_another_download, "model-00002-of-00002.safetensors lacks tensors that the index places in it"),
    (no_tokenizer, "no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)"),
    (cut_tokenizer, "tokenizer.json is no JSON"),
    (gguf_folder, "GGUF, llama.cpp's format, cannot be trained"),
    (gguf_beside_its_configuration, "no weights (model*.safetensors), only tiny-q4_k_m.gguf"),
    (gguf_file, "GGUF, llama.cpp's format, cannot be trained"),
    (a_file, "a file, no directory"),
    (link_to_nothing, "a link to gone, which is not there"),
    (pytorch_files, "no weights (model*.safetensors), only pytorch_model.bin"),
    (other_name, "no weights (model*.safetensors), only consolidated.safetensors"),
    (adapter, "an adapter, no model: name its base as model"),
    (cache, "model/snapshots/0123abcd: name that folder"),
    (no_such_type, "(the mlx-lm on this host has no model type bert); name a model of another type, or install"),
    (own_code, "set trust_remote_code = true in [job] if you trust it"),
    (a_layer_more, "it cannot be loaded: ValueError: Missing 9 parameters: model.layers.2."),
    (a_tensor_less, "it cannot be loaded: ValueError: Missing 1 parameters: model.layers.1.mlp.up_proj.weight"),
    (tokenizer_of_another_model, "its tokenizer has tokens up to 4,000, its embedding 384 rows"),
    (end_beyond, "token '<|im_end|>' is 384, beyond the embedding's 384 rows"),
    (template_beyond, "token '<|im_start|>' is 384, beyond the embedding's 384 rows"),
]
"""Those that take no import of mlx-lm, and one that does of each kind."""
REFUSED_BY_MLX_LM: list[tuple[Callable[[Path], None], str]] = [
    (vocabulary_alone, "it cannot be loaded: "),
    (another_vocabulary, "it cannot be loaded: ValueError: Expected shape (500, 128)"),
    (another_width, "it cannot be loaded: ValueError: Expected shape"),
    (a_layer_less, "it cannot be loaded: ValueError: Received 9 parameters not in model: model.layers.1."),
    (no_head, "it cannot be loaded: ValueError: Missing 1 parameters: lm_head.weight"),
    (unknown_format, "it cannot be loaded: ValueError: unsupported compressed-tensors format"),
    (eight_bits, "it cannot be loaded: ValueError: Only bits=8 is supported"),
    (type_in_capitals, "Model type Llama not supported. Did you mean llama? (the mlx-lm on this host has no"),
    (own_tokenizer, "set trust_remote_code = true in [job] if you trust it"),
]


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        *(pytest.param(*each, id=each[0].__name__) for each in REFUSED),
        *(pytest.param(*each, id=each[0].__name__, marks=pytest.mark.slow) for each in REFUSED_BY_MLX_LM),
    ],
)
@pytest.mark.usefixtures("tried_here")
async def test_what_cannot_be_loaded_is_refused(
    config: Config, model: Path, harm: Callable[[Path], None], expected: str
) -> None:
    harm(model)
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.FAIL and expected in result.summary, result.summary


def gap(model: Path) -> None:
    """Bytes of no tensor between two, and at the end."""
    header, data = tensors(model / WEIGHTS)
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"])
    begin, end = header[last]["data_offsets"]
    header[last]["data_offsets"] = [begin + 64, end + 64]
    write(model / WEIGHTS, header, data[:begin] + bytes(64) + data[begin:] + bytes(64))


def index_of_former_shards(model: Path) -> None:
    names = [name for name in tensors(model / WEIGHTS)[0] if name != "__metadata__"]
    index = {
        "weight_map": {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(names)}
    }
    (model / probe.INDEX).write_text(json.dumps(index))


def former_shard_beside(model: Path) -> None:
    shutil.copyfile(model / WEIGHTS, model / "model-00001-of-00002.safetensors")


def readme_pointer(model: Path) -> None:
    (model / "figure.png").write_bytes(LFS)
    (model / "README.md").symlink_to("../gone")


def gguf_beside(model: Path) -> None:
    (model / "tiny-q4_k_m.gguf").write_bytes(b"GGUF\3\0\0\0")


def auto_map_of_a_known_type(model: Path) -> None:
    change(model / CONFIG, auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"})


def two_shards(model: Path) -> None:
    split(model)


LOADS = [
    gap,
    index_of_former_shards,
    former_shard_beside,
    readme_pointer,
    gguf_beside,
    auto_map_of_a_known_type,
    two_shards,
]


@pytest.mark.parametrize("change_it", LOADS, ids=[each.__name__ for each in LOADS])
@pytest.mark.usefixtures("tried_here")
async def test_what_loads_is_not_refused(config: Config, model: Path, change_it: Callable[[Path], None]) -> None:
    change_it(model)
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.PASS, result.summary


async def test_an_added_token_beyond_the_embedding_that_nothing_uses_is_a_warning(config: Config, model: Path) -> None:
    add_token(model, "<image_soft_token>")
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.WARN and "'<image_soft_token>' is 384" in result.summary


async def test_code_of_its_own_is_neither_run_nor_refused_where_it_is_trusted(config: Config, model: Path) -> None:
    own_code(model)
    settings = {**config.job.mlx_lm, "trust_remote_code": True}
    job = config.job.model_copy(update={"mlx_lm": settings})
    result = await run_check(check.run, config.model_copy(update={"job": job}))
    assert result.status is CheckStatus.PASS, result.summary


async def test_a_whole_model_is_not_tried(config: Config, model: Path) -> None:
    """What leaves no doubt costs no import of mlx-lm."""
    assert probe.probe_model(str(model))["doubts"] == []
    result: CheckResult = await run_check(check.run, config)
    assert result.status is CheckStatus.PASS


@pytest.mark.slow
@pytest.mark.parametrize("kind", model_types())
def test_every_model_type_of_mlx_lm_passes(tmp_path: Path, kind: str) -> None:
    with_optional_packages()
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, tiny_config(kind))
    found = probe.probe_model(str(model))
    assert (found["faults"], found["warnings"]) == ([], [])
    # As the check does; here all in one process, which imports mlx-lm once.
    assert not found["doubts"] or probe_loading(str(model), "mlx") == {"loads": True}


def test_a_folder_that_may_not_be_read_is_said_to_be_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(model / WEIGHTS))

    monkeypatch.setattr(probe, "check_header", refusing)
    assert probe.probe_model(str(model))["faults"] == ["model.safetensors: Permission denied"]
