"""What is published for LM Studio, Ollama and llama.cpp, what is refused, and what the card says."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.api import Engine, PublicationRequest
from engine.errors import InputError, StateError
from engine.protocol.task import Task
from engine.publish.model_folder import read_folder
from engine.publish.targets import Publication
from engine.run.events import ResultReported, SavedFiles, WeightsSaved
from engine.run.run_plan import read_plan, write_plan
from engine.store.layout import RunDir
from engine.task_result import Evaluated, Fused, Variant
from tests.model_files import safetensors
from tests.tui.commands import flightdeck
from tests.unit.publish.conftest import LORA, WriteModel, ended_run, write_adapter
from tests.unit.run.run_maker import START, MadeRun, make_run_config

PEFT = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 8),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (8, 2),
}


def publish(home: Path, run: str, target: str, folder: Path, place: Path, **more: Any) -> Publication:
    return Engine(home).results.publish(PublicationRequest(run, target, folder, str(place), **more))


def refusal(home: Path, run: str, target: str, folder: Path, place: Path) -> str:
    with pytest.raises(InputError) as refused:
        publish(home, run, target, folder, place)
    assert not place.exists() or not [*place.iterdir()], "nothing is left"
    return str(refused.value)


def write_peft(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None, **config: object) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(safetensors(shapes or PEFT))
    about = {"r": 2, "lora_alpha": 40, "base_model_name_or_path": "/Users/ana/models/Tiny"}
    (folder / "adapter_config.json").write_text(json.dumps({**about, **config}))
    return folder


def card(publication: Publication) -> str:
    assert publication.folder is not None
    return (publication.folder / "README.md").read_text()


def test_lm_studio_has_the_model_below_its_publisher(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    model, place = write_model(), tmp_path / "models"
    publication = publish(home, run, "lmstudio", model, place)
    assert publication.folder == place / "flightdeck" / run
    assert (publication.folder / "model.safetensors").samefile(model / "model.safetensors"), (
        "no second copy on the disk"
    )
    assert json.loads((publication.folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    written = "".join(path.read_text() for path in publication.folder.glob("*.[jm][sd]*"))
    assert "/Users/ana" not in written
    with pytest.raises(InputError, match="it is published there already"):
        publish(home, run, "lmstudio", model, place)


def test_ollama_converts_a_model_that_it_knows_itself(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    publication = publish(home, run, "ollama", write_model(), tmp_path / "out")
    assert publication.folder is not None
    assert (publication.folder / "Modelfile").read_text().splitlines() == [
        "FROM .",
        "PARAMETER temperature 0.6",
        "PARAMETER top_k 20",
        'PARAMETER stop "<|end|>"',
    ]
    assert publication.commands == (f"ollama create {run} -f Modelfile", f"ollama run {run}")


def test_what_ollama_does_not_convert_comes_by_gguf(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    model = write_model(architectures=["Qwen3ForCausalLM"])
    (model / "tokenizer_config.json").unlink()
    publication = publish(home, run, "ollama", model, tmp_path / "out")
    assert publication.folder is not None
    lines = (publication.folder / "Modelfile").read_text().splitlines()
    assert (lines[0], lines[-1]) == (f"FROM ./{run}.gguf", 'TEMPLATE "{{ .Prompt }}"')
    assert publication.commands[0].startswith("python $LLAMA_CPP/convert_hf_to_gguf.py . --outfile ")


def test_llama_cpp_converts_and_quantizes_a_model_by_the_commands(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    publication = publish(home, run, "gguf", write_model(), tmp_path / "out")
    assert publication.commands[:2] == (
        f"python $LLAMA_CPP/convert_hf_to_gguf.py . --outfile {run}.gguf --outtype auto",
        f"llama-quantize {run}.gguf {run}-Q4_K_M.gguf Q4_K_M",
    )
    assert all(command in card(publication) for command in publication.commands)


def test_an_adapter_of_peft_is_converted_beside_its_base(home: Path, tmp_path: Path) -> None:
    adapter = write_peft(tmp_path / "peft")
    run = ended_run(home, adapter / "adapter_model.safetensors")
    publication = publish(home, run, "ollama", adapter, tmp_path / "out", base_model="ana/Tiny")
    assert publication.folder is not None
    assert (publication.folder / "Modelfile").read_text() == f"FROM ./base.gguf\nADAPTER ./{run}.gguf\n"
    convert = f"python $LLAMA_CPP/convert_lora_to_gguf.py . --outfile {run}.gguf --base {{}}"
    assert publication.commands[1] == convert.format("/Users/ana/models/Tiny"), "on this machine"
    assert convert.format("ana/Tiny") in card(publication)
    config = json.loads((publication.folder / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["lora_alpha"]) == ("ana/Tiny", 40)


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "mlx": ({"quantization": {"bits": 4, "group_size": 64}}, "they are quantized.*flightdeck fuse .* --dequantize"),
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "they are quantized"),
    "unknown": ({"architectures": ["Qwen3NextForCausalLM"]}, "what mlx-lm saves of Qwen3NextForCausalLM is not known"),
    "nameless": ({"architectures": None}, "chooses by architectures"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_model_that_the_converter_cannot_read_is_refused(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path, case: str
) -> None:
    config, why = UNREADABLE[case]
    model = write_model(**config)
    assert re.search(why, refusal(home, run, "ollama", model, tmp_path / "out"))
    assert re.search(why, refusal(home, run, "gguf", model, tmp_path / "out"))


def test_what_transformers_saved_is_converted_whatever_its_architecture(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    model = write_model(architectures=["Qwen3NextForCausalLM"])
    whole = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.dumps(json.loads(whole[8 : 8 + length]) | {"__metadata__": {"format": "pt"}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    publication = publish(home, run, "gguf", model, tmp_path / "out")
    assert "library_name: transformers" in card(publication)


@pytest.mark.parametrize("target", ["lmstudio", "ollama", "gguf"])
def test_an_adapter_of_mlx_lm_is_fused_first(home: Path, run: str, adapter: Path, tmp_path: Path, target: str) -> None:
    text = refusal(home, run, target, adapter, tmp_path / "out")
    assert f"flightdeck fuse {run}" in text
    assert ("not a whole model" if target == "lmstudio" else "does not read the scale") in text


TAKEN_FOR_ANOTHER: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "base_model.model.x.lora_magnitude_vector": (
        {"base_model.model.x.lora_magnitude_vector": (8,)},
        {"use_dora": True},
    ),
    "base_model.model.lm_head.lora_A.weight": ({"base_model.model.lm_head.lora_A.weight": (2, 8)}, {}),
    "use_rslora": ({}, {"use_rslora": True}),
}


@pytest.mark.parametrize("what", TAKEN_FOR_ANOTHER)
def test_an_adapter_that_the_converter_takes_for_another_is_refused(
    home: Path, run: str, tmp_path: Path, what: str
) -> None:
    shapes, config = TAKEN_FOR_ANOTHER[what]
    text = refusal(home, run, "gguf", write_peft(tmp_path / "peft", PEFT | shapes, **config), tmp_path / "out")
    assert f"llama.cpp's converter does not take {what}" in text


def test_trained_layers_alone_are_refused(home: Path, run: str, tmp_path: Path) -> None:
    layers = write_adapter(tmp_path / "full", {"model.norm.weight": (8,)}, fine_tune_type="full")
    assert "they are not a whole model" in refusal(home, run, "gguf", layers, tmp_path / "out")


def test_weights_of_another_run_are_refused(home: Path, run: str, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", {**LORA, "model.layers.0.mlp.up_proj.lora_a": (8, 2)})
    request = PublicationRequest(run, "hub", other, "ana/x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_abcdefghijklmnop1234")
        with pytest.raises(InputError, match="not the run's weights"):
            Engine(home).results.publish(request)


INDEX = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
NOT_WHOLE: dict[str, dict[str, bytes]] = {
    "neither an adapter": {},
    r"nor a whole model \(weights\)": {"config.json": b"{}"},
    "no safetensors header": {"config.json": b"{}", "model.safetensors": b"?"},
    r"\(model-2.safetensors\)": {
        "config.json": b"{}",
        "model-1.safetensors": safetensors({"a": (1,)}),
        "model.safetensors.index.json": INDEX,
    },
}


@pytest.mark.parametrize("why", NOT_WHOLE, ids=["empty", "no weights", "damaged", "a part is missing"])
def test_a_folder_without_whole_weights_is_refused(home: Path, run: str, tmp_path: Path, why: str) -> None:
    (tmp_path / "folder").mkdir()
    for name, content in NOT_WHOLE[why].items():
        (tmp_path / "folder" / name).write_bytes(content)
    assert re.search(why, refusal(home, run, "gguf", tmp_path / "folder", tmp_path / "out"))


def test_the_card_tells_how_the_run_went_and_nothing_of_its_machines(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    text = card(publish(home, run, "gguf", write_model(), tmp_path / "out", license="apache-2.0"))
    front = yaml.safe_load(text.split("---")[1])
    assert (front["license"], front["library_name"], front["tags"]) == (
        "apache-2.0",
        "mlx",
        ["mlx", "lora", "flightdeck"],
    )
    checksums = {"train.jsonl": "crc32 0123abcd", "the base model": "fedcba9876543210"}
    assert front["flightdeck"] == {"run": run, "checksums": checksums}
    assert "base_model" not in front, "only its folder's name is known, and that is none of the Hub's"
    assert "**The run did not succeed: it ended as aborted** (on request) at iteration 25 of 60." in text
    assert "| base model |  | 5.0000 | 148.413 |" in text
    assert "| last validation | 20 | 2.0000 | 7.389 |" in text
    assert "| trained tokens | 4000 |" in text
    assert "| machines | 1 |" in text
    assert "| learning_rate | 0.0001 |" in text
    assert "| mlx | 0.32.4 |" in text
    assert "trained from Tiny with" in text
    for secret in ("of-the-job-12345", "/Users/", "ana", "node0", "127.0.0.1"):
        assert secret not in text


def test_the_card_names_the_rate_that_the_trainer_has_found(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    """With batch_tokens the configuration says "auto" alone."""
    path = RunDir(home / "runs" / run).plan
    plan = read_plan(path)
    job = plan.config.job.model_copy(update={"mlx_lm": {**plan.config.job.mlx_lm, "learning_rate": "auto"}})
    write_plan(path, plan.model_copy(update={"config": plan.config.model_copy(update={"job": job})}))
    assert "| learning_rate | 0.001 |" in card(publish(home, run, "gguf", write_model(), tmp_path / "out"))


def test_the_base_is_named_as_the_hub_does_where_that_is_known(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    named = {"base_model": "Qwen/Qwen3-0.6B", "license": "of-the-job-12345"}
    text = card(publish(home, run, "gguf", write_model(), tmp_path / "out", **named))
    front = yaml.safe_load(text.split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("Qwen/Qwen3-0.6B", "finetune")
    assert "of-the-job-12345" not in text, "a value of the job's environment"


LOSSES: dict[Variant, float] = {"base": 5.0, "adapter": 2.0, "fused": 2.03}


def fused_model(home: Path, run: str, model: Path, *, kind: str = "fuse") -> MadeRun:
    """A task of the run that has measured its weights and, as a fusion, left this model."""
    config = make_run_config(1, name=f"support-{kind}")
    task = Task(kind, run, str(home.parent / "adapter" / "adapters.safetensors"))  # type: ignore[arg-type]
    config = config.model_copy(update={"job": config.job.model_copy(update={"task": task})})
    made = MadeRun(home, name=f"support-{kind}", created=START + timedelta(hours=1), config=config).attempt()
    names: list[Variant] = ["base", "adapter", "fused"] if kind == "fuse" else ["base", "adapter"]
    losses = [Evaluated(variant=name, split="test", loss=LOSSES[name], tokens=900, seconds=1.0) for name in names]
    made.append(*(ResultReported(result=result) for result in losses))
    if kind == "fuse":
        made.append(
            WeightsSaved(rank=0, node="node0", attempt=1, holds="model", saved=saved_files(model)),
            ResultReported(result=Fused(path=str(model), bytes=9, kept=0.99, accepted=True)),
        )
    return made.state("running", "succeeded").close()


def saved_files(folder: Path) -> SavedFiles:
    contents = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
    files = tuple((name, len(content), hashlib.sha256(content).hexdigest()) for name, content in contents)
    return SavedFiles(folder=str(folder), iteration=0, files=files)


def test_the_card_has_what_was_measured_of_the_published_weights_and_of_no_others(
    home: Path, run: str, adapter: Path, write_model: WriteModel, tmp_path: Path
) -> None:
    model = write_model()
    fused_model(home, run, model)
    text = card(publish(home, run, "gguf", model, tmp_path / "out"))
    assert "| fused, 900 tokens of test |  | 2.0300 | 7.614 |" in text
    rows = [text.index(f"| {name}, 900 tokens of test |") for name in ("base", "adapter", "fused")]
    assert rows == sorted(rows)
    assert "The fused model keeps 99.0% of the gain of what was trained over the base model." in text
    (model / "model.safetensors").write_bytes(safetensors(LORA))
    text = card(publish(home, run, "gguf", model, tmp_path / "other"))
    assert "of test" not in text and "keeps" not in text, "another model than was measured"
    fused_model(home, run, model, kind="evaluate")
    results = Engine(home).results
    measured = [
        *results._measured(Engine(home).runs.record(run), read_folder(adapter), f"{adapter}/adapters.safetensors")
    ]
    assert [getattr(result, "variant", "fused") for result in measured] == ["base", "adapter"] * 2


def test_a_target_that_takes_no_adapter_is_refused_before_anything_is_fetched_and_gets_the_fused_model(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    done = flightdeck(home, "publish", run, "--ollama", str(tmp_path / "out"), cwd=tmp_path)
    assert done.code == 2 and "Ollama's does not read the scale" in done.err and f"flightdeck fuse {run}" in done.err
    assert not (tmp_path / run).exists()
    fused_model(home, run, model := write_model())
    assert Engine(home).results.to_publish(run, "ollama") == ("fused", model)
    assert Engine(home).results.to_publish(run, "hub") == ("trained", None)
    assert flightdeck(home, "publish", run, "--ollama", str(tmp_path / "out"), cwd=tmp_path).code == 0
    model.rename(elsewhere := tmp_path / "elsewhere")
    assert Engine(home).results.to_publish(run, "hub", fused=True) == ("fused", None)
    elsewhere.rename(model)
    done = flightdeck(home, "fetch", run, "--fused", cwd=tmp_path)
    assert done.code == 0, done
    assert (tmp_path / f"{run}-fused" / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_a_run_whose_weights_are_not_known_is_not_published(
    home: Path, write_model: WriteModel, tmp_path: Path
) -> None:
    running = MadeRun(home, name="running", number=1).state("running").close().id
    assert "the run goes on" in refusal(home, running, "gguf", write_model(), tmp_path / "out")
    command = MadeRun(home, name="own", number=2, command=("python", "x.py")).state("running", "succeeded").close().id
    assert "the job runs a command of its own" in refusal(home, command, "gguf", tmp_path / "model", tmp_path / "out")


def test_the_command_prints_where_it_is_and_what_to_run(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path
) -> None:
    source = str(write_model())
    done = flightdeck(home, "publish", "last", "--from", source, "--gguf", cwd=tmp_path)
    assert done.code == 0, done
    first, *_, cd, convert, _, _, note = done.out.splitlines()
    assert (first, cd.strip()) == (f"published {run}-gguf", f"cd {run}-gguf")
    assert convert.strip() == f"python $LLAMA_CPP/convert_hf_to_gguf.py . --outfile {run}.gguf --outtype auto"
    assert note.endswith("LLAMA_CPP is a checkout of https://github.com/ggml-org/llama.cpp")
    done = flightdeck(home, "publish", run, "--from", source, "--ollama", str(tmp_path / "out"), "--json")
    document = json.loads(done.out)
    assert document["folder"] == str(tmp_path / "out" / f"{run}-ollama")
    assert document["commands"][0] == f"ollama create {run} -f Modelfile"


def test_a_full_disk_is_named_by_the_folder_that_is_written(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target)

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    model, place = write_model(), tmp_path / "models"
    with pytest.raises(StateError) as raised:
        publish(home, run, "gguf", model, place)
    why = "it cannot be published: No space left on device"
    assert str(raised.value) == f"{place / f'{run}-gguf'}: {why}" and not [*place.iterdir()]


def test_a_file_that_cannot_be_read_is_named_and_else_the_folder_to_be_written(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    monkeypatch.setattr(os, "link", unreadable)
    monkeypatch.setattr(shutil, "copyfile", unreadable)
    model, place = write_model(), tmp_path / "models"
    with pytest.raises(StateError, match=rf"{model}/\S+: it cannot be published: Permission denied"):
        publish(home, run, "gguf", model, place)

    def withheld(*_: object, dir: Path, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir / ".scratch"))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", withheld)
    with pytest.raises(StateError, match=rf"{place}/{run}-gguf: it cannot be published: Permission denied"):
        publish(home, run, "gguf", model, place)


@pytest.mark.parametrize(
    "arguments", [(), ("--lmstudio", "a", "--gguf", "b"), ("--gguf", "out", "--private"), ("--gguf", "a;b")]
)
def test_the_command_refuses_what_it_is_not_for(
    home: Path, run: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = flightdeck(home, "publish", run, "--from", str(tmp_path), *arguments, cwd=tmp_path)
    assert (done.code, done.out) == (2, "")


def test_lm_studios_own_folder_is_used_where_it_is_there(
    home: Path, run: str, write_model: WriteModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = str(write_model())
    done = flightdeck(home, "publish", run, "--from", model, "--lmstudio")
    assert (done.code, "LM Studio's models were not found (give their folder)" in done.err) == (2, True), done
    models = tmp_path / ".lmstudio" / "models"
    models.mkdir(parents=True)
    assert flightdeck(home, "publish", run, "--from", model, "--lmstudio").code == 0
    assert (models / "flightdeck" / run / "config.json").is_file()


def test_the_last_run_is_the_last_training(home: Path, run: str, write_model: WriteModel, tmp_path: Path) -> None:
    config = make_run_config(name="eval")
    config = config.model_copy(update={"job": config.job.model_copy(update={"task": Task("evaluate", run)})})
    later = MadeRun(home, name="eval", created=START + timedelta(hours=1), config=config).state("succeeded").close()
    publication = publish(home, "last", "gguf", write_model(), tmp_path / "out")
    assert publication.folder == tmp_path / "out" / f"{run}-gguf"
    assert "name that run" in refusal(home, later.id, "gguf", tmp_path / "model", tmp_path / "none")
