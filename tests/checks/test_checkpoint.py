"""checkpoint_layer tries what saving does, verifies what is saved there, and compares what is to be resumed."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checks import checkpoint as check
from engine.checks.check import Findings
from engine.checks.context import CheckContext
from engine.cluster.probe_results import AdapterWeights, CheckpointStorage
from engine.config.models import CheckpointConfig, Config
from engine.models import CheckStatus
from engine.node.probes import storage
from engine.protocol import attempt
from tests.checks.conftest import fleet_of, run_check, run_fix

pytestmark = pytest.mark.usefixtures("shared_agent")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "torch_dtype": "float32",
}


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


@pytest.fixture
def saving(config: Config, model: Path, adapters: Path) -> Config:
    """A LoRA job on the last two of four layers, which saves in a folder below its workdir."""
    (model / "config.json").write_text(json.dumps(LLAMA))
    lora = {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    return with_settings(config, adapter_path="adapters", num_layers=2, save_every=5, iters=10, lora_parameters=lora)


def with_settings(config: Config, **settings: Any) -> Config:
    """The same with other keys of mlx-lm's; both ranks have the workdir as the folder that paths are relative to."""
    base = config.file or Path(config.nodes[0].workdir) / "flightdeck.toml"
    job = config.job.model_copy(update={"mlx_lm": {**config.job.mlx_lm, **settings}})
    return config.model_copy(update={"job": job, "file": base})


def weights(path: Path, *layers: int, rank: int = 8, names: str = "self_attn.q_proj", dora: bool = False) -> Path:
    """A safetensors file of adapters."""
    shapes: dict[str, list[int]] = {}
    for layer in layers:
        shapes[f"model.layers.{layer}.{names}.lora_a"] = [64, rank]
        shapes[f"model.layers.{layer}.{names}.lora_b"] = [rank, 64]
        if dora:
            shapes[f"model.layers.{layer}.{names}.m"] = [64]
    return tensors(path, shapes)


def tensors(path: Path, shapes: dict[str, list[int]]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, shape in shapes.items():
        size = 4
        for axis in shape:
            size *= axis
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return path


async def test_a_good_place_passes_with_what_is_saved(saving: Config, adapters: Path) -> None:
    result = await run_check(check.run, saving)
    # Two layers, one adapter of 64 × 8 and 8 × 64 each, float32.
    assert (result.status, result.summary) == (CheckStatus.PASS, "every node can save, 8.2 kB a save")
    assert result.evidence["node0"].startswith(f"{adapters}, ")
    assert list(adapters.iterdir()) == []


async def test_what_is_needed_follows_the_adapters_and_how_often_they_are_saved(saving: Config) -> None:
    """And the states beside them, of three float32 numbers for each that is trained: twice as many as are kept."""
    for save_every, files in ((5, 4), (1, 12)):
        async with fleet_of(saving) as fleet:
            context = CheckContext(with_settings(saving, save_every=save_every), fleet)
            state = await check.save_size(context)
            await context.close()
        assert state.saved_bytes == 2 * 2 * 64 * 8 * 4
        assert state.needed_bytes == state.saved_bytes * files + 2 * 3 * 3 * state.saved_bytes


@pytest.mark.parametrize(("strategy", "weights"), [("data", 3), ("sharded", 1.5), ("pipeline", 3), ("local", 5)])
async def test_a_rank_needs_room_for_what_it_writes(saving: Config, strategy: str, weights: float) -> None:
    """In float32 values per trained parameter. The second stage has both layers that are trained."""
    job = with_settings(saving, outer_momentum=0.9, optimizer="adamw").job.model_copy(update={"strategy": strategy})
    async with fleet_of(saving) as fleet:
        context = CheckContext(saving.model_copy(update={"job": job}), fleet)
        state = await check.save_size(context)
        await context.close()
    assert state.saved_bytes is not None
    assert state.needed_bytes == state.saved_bytes * 4 + 2 * 3 * weights * state.saved_bytes


async def test_what_is_needed_is_known_of_a_job_by_tokens(saving: Config) -> None:
    async with fleet_of(saving) as fleet:
        context = CheckContext(with_settings(saving, batch_size=None, batch_tokens=64, iters=None, epochs=1), fleet)
        assert (await check.save_size(context)).needed_bytes
        await context.close()


@pytest.mark.parametrize(
    ("checkpoint", "count"),
    [
        ({}, 6),
        ({"keep": 1}, 2),
        ({"enabled": False}, 1),
        ({"destination": "/mnt/x"}, 1),
        ({"destination": "s3://b"}, 6),
    ],
)
def test_room_is_wanted_for_the_states_that_lie_there(saving: Config, checkpoint: dict[str, Any], count: int) -> None:
    assert check.state_count(saving.model_copy(update={"checkpoint": CheckpointConfig(**checkpoint)})) == count


async def test_a_place_that_is_missing_is_tried_and_not_made(saving: Config, adapters: Path) -> None:
    adapters.rmdir()
    assert (await run_check(check.run, saving)).status is CheckStatus.PASS
    assert not adapters.exists()


async def test_a_link_to_what_is_not_there_comes_with_what_makes_it(
    saving: Config, adapters: Path, tmp_path: Path
) -> None:
    adapters.rmdir()
    adapters.symlink_to(tmp_path / "disk" / "adapters")
    result = await run_check(check.run, saving)
    assert f"leads to {tmp_path / 'disk' / 'adapters'}, which is not there" in result.summary
    await run_fix(result.fix_command)
    assert (await run_check(check.run, saving)).status is CheckStatus.PASS


@pytest.mark.parametrize("how", ["absolute", "symlink"])
async def test_a_place_outside_of_the_allowed_roots_is_refused(
    saving: Config, adapters: Path, tmp_path: Path, how: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    nodes = tuple(node.model_copy(update={"workdir": str(tmp_path / "work")}) for node in saving.nodes)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "adapters").symlink_to(outside)
    named = str(outside) if how == "absolute" else str(tmp_path / "work" / "adapters")
    config = with_settings(saving, adapter_path=named).model_copy(update={"nodes": nodes})
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.FAIL
    assert "lies outside of the allowed directories" in result.summary
    assert "[preflight] roots" in result.summary
    roots = config.preflight.model_copy(update={"roots": (str(outside),)})
    assert (await run_check(check.run, config.model_copy(update={"preflight": roots}))).status is CheckStatus.PASS


async def test_a_workdir_that_is_not_there_is_made_by_the_fix(saving: Config, tmp_path: Path) -> None:
    nodes = tuple(node.model_copy(update={"workdir": str(tmp_path / "work")}) for node in saving.nodes)
    config = with_settings(saving, adapter_path=str(tmp_path / "work" / "out")).model_copy(update={"nodes": nodes})
    result = await run_check(check.run, config)
    assert result.status is CheckStatus.FAIL and f"workdir {tmp_path}/work is not there" in result.summary
    await run_fix(result.fixes["node0"])
    assert (await run_check(check.run, config)).status is CheckStatus.PASS


async def test_a_torn_file_and_a_torn_configuration_are_put_aside_by_the_fix(saving: Config, adapters: Path) -> None:
    weights(adapters / "0000005_adapters.safetensors", 2, 3)
    torn = weights(adapters / "adapters.safetensors", 2, 3)
    torn.write_bytes(torn.read_bytes()[:-1])
    (adapters / "adapter_config.json").write_text("{")
    (adapters / ".adapters.123.safetensors").write_bytes(b"being written")
    result = await run_check(check.run, saving)
    assert result.status is CheckStatus.FAIL
    assert "adapters.safetensors is damaged: its tensors need " in result.summary
    assert "adapter_config.json is damaged: it is no JSON" in result.summary
    await run_fix(result.fixes["node0"])
    assert (await run_check(check.run, saving)).status is CheckStatus.PASS
    assert (adapters / "adapters.safetensors.damaged").exists()
    (adapters / "adapters.safetensors").write_bytes(b"torn again")
    before = (adapters / "adapters.safetensors.damaged").read_bytes()
    again = (await run_check(check.run, saving)).fixes["node0"]
    with pytest.raises(AssertionError):
        await run_fix(again)
    assert (adapters / "adapters.safetensors.damaged").read_bytes() == before


def test_a_link_in_the_place_of_what_is_tried_has_its_target_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    link = tmp_path / f"..flightdeck-{os.getpid()}.{os.getpid()}"
    link.symlink_to("precious")
    with pytest.raises(OSError, match="symbolic link"):
        storage.write(tmp_path)
    storage.write(tmp_path)
    assert (tmp_path / "precious").read_text() == "kept" and not link.is_symlink()


@pytest.mark.needs("linux")
async def test_a_torn_file_that_no_command_can_name_is_named_without_a_fix(saving: Config, adapters: Path) -> None:
    (adapters / "a\udcff.safetensors").write_bytes(b"torn")
    result = await run_check(check.run, saving)
    assert result.status is CheckStatus.FAIL and r"a\udcff.safetensors is damaged" in result.summary
    assert result.fixes == {}


@pytest.mark.parametrize(
    "content", [b"", b"1234567", bytes(7) + b"\xff", (5).to_bytes(8, "little") + b"[1,2]", b"\x02" + bytes(7) + b"{}x"]
)
def test_what_is_no_safetensors_file_is_damaged_and_raises_nothing_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert storage.safetensors_fault(tmp_path / "x") is not None


async def test_what_is_resumed_must_be_what_is_trained(saving: Config, adapters: Path) -> None:
    weights(adapters / "old.safetensors", 2, 3)
    good = with_settings(saving, resume_adapter_file="adapters/old.safetensors")
    result = await run_check(check.run, good)
    assert result.status is CheckStatus.PASS
    assert "resumes lora of 2 layers" in result.evidence["node0"]
    for wrong, message in (
        ({"rank": 16}, "has rank 16"),
        ({"dora": True}, "holds weights of dora"),
        ({"names": "mlp.up_proj"}, "adapts mlp.up_proj"),
    ):
        weights(adapters / "old.safetensors", 2, 3, **wrong)
        assert message in (await run_check(check.run, good)).summary
    weights(adapters / "old.safetensors", 0, 1, 2, 3)
    assert "has layers 0 to 3, and num_layers trains 2 to 3 of 4" in (await run_check(check.run, good)).summary
    (adapters / "old.safetensors").unlink()
    assert "old.safetensors is not there" in (await run_check(check.run, good)).summary


ALL = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")


def archived(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        # ZipInfo has no date of today's, which would be in the names of the tests: no two workers have the same.
        archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def resumed_from(root: Path, path: Path) -> str:
    """Why the storage probe refuses to resume from it."""
    asked: dict[str, Any] = {
        "workdir": str(root),
        "directory": str(root),
        "roots": [str(root)],
        "runs": str(root),
        "states": None,
    }
    return str(storage.probe_storage(json.dumps({**asked, "needed": 0, "resume": str(path)}))["resume_fault"])


def adapted(modules: Sequence[str], prefix: str = "") -> dict[str, mx.array]:
    """Adapters of rank 8 of these matrices of LLAMA's last two layers."""
    out = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "mlp.up_proj": 128}
    shapes = {
        f"{prefix}model.layers.{layer}.{name}.lora_{which}": shape
        for layer in (2, 3)
        for name in modules
        for which, shape in (("a", (64, 8)), ("b", (8, out[name])))
    }
    return {name: mx.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize(
    ("name", "arrays", "keys", "message"),
    [
        ("whole.safetensors", adapted(ALL), ALL, None),
        ("whole.npz", adapted(ALL), ALL, None),
        ("vlm.safetensors", adapted(ALL, "language_model."), ALL, "none of its 12 tensors is one of the job's"),
        ("vlm.npz", adapted(ALL, "language_model."), None, "save it anew with the job's prefix"),
        ("old.npz", adapted(ALL[:1]), None, "adapts self_attn.q_proj alone, 4 of the 28 tensors that the job trains"),
        (
            "old.safetensors",
            adapted(ALL[:2]),
            None,
            'set lora_parameters.keys = ["self_attn.k_proj", "self_attn.q_proj"] and num_layers = 2',
        ),
        (
            "wide.npz",
            {**adapted(ALL), "model.layers.2.mlp.up_proj.lora_b": mx.zeros((8, 9))},
            ALL,
            "the job's [8, 128]",
        ),
        ("more.npz", {**adapted(ALL), "model.norm.lora": mx.zeros((8, 8))}, ALL, "1 of its 13 tensors are none of the"),
    ],
)
async def test_an_adapter_is_compared_with_the_jobs_own_tensors(
    saving: Config, name: str, arrays: dict[str, mx.array], keys: Sequence[str] | None, message: str | None
) -> None:
    adapters = Path(saving.nodes[0].workdir, "adapters")
    if name.endswith(".npz"):
        mx.savez(str(adapters / name), **arrays)
    else:
        mx.save_safetensors(str(adapters / name), arrays)
    lora = {"rank": 8, "scale": 20.0, "dropout": 0.0, **({"keys": list(keys)} if keys else {})}
    resumed = with_settings(saving, resume_adapter_file=f"adapters/{name}", lora_parameters=lora)
    result = await run_check(check.run, resumed)
    assert (result.status is CheckStatus.PASS) == (message is None), result.summary
    assert message is None or message in result.summary


@pytest.mark.usefixtures("tried_here")
async def test_layers_of_a_full_fine_tuning_are_compared_with_the_jobs(saving: Config, adapters: Path) -> None:
    up = {f"model.layers.{layer}.mlp.up_proj.weight": mx.zeros((128, 64)) for layer in (2, 3)}
    mx.save_safetensors(str(adapters / "full.safetensors"), up)
    full = with_settings(saving, resume_adapter_file="adapters/full.safetensors")
    full = full.model_copy(update={"job": full.job.model_copy(update={"fine_tune_type": "full"})})
    result = await run_check(check.run, full)
    assert "has 2 of the 18 tensors that the job trains: set num_layers = 2" in result.summary


@given(st.dictionaries(st.text("ab.", min_size=1), st.lists(st.integers(0, 3), max_size=3), max_size=4))
def test_an_archive_of_arrays_is_read_as_mlx_reads_it(arrays: dict[str, list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, save = Path(folder, "x.npz"), cast("Any", np.savez)
        save(path, **{name: np.zeros(shape, dtype="<f2") for name, shape in arrays.items()})
        assert storage.shapes(path) == {name: tuple(shape) for name, shape in arrays.items()}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", b"x" * 100, "its NPZ archive cannot be read: File is not a zip file"),
        ("a.npz", archived("w.npy", b"\x93NUMPY\x01\0\x05\0[1,2]"), "its NPZ archive cannot be read"),
        ("a.npz", archived("w.npy", b"short"), "its NPZ archive cannot be read"),
        ("a.npz", archived("w.npy", b"\x93NUMPY\x01\0\x0f\0{'shape': (-1,)}"), "its NPZ archive cannot be read"),
        ("a.safetensors", archived("w.npy", b""), "a zip archive: call it *.npz if mlx-lm made it"),
        ("a.bin", archived("x/data.pkl", b""), "if PyTorch, save it by safetensors.torch.save_file"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer (git lfs pull)"),
        ("a.gguf", b"GGUF" + bytes(99), "it is GGUF"),
        ("a.safetensors", b"\xff" * 99, "its header is longer than the file"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in str(resumed_from(tmp_path, tmp_path / name))


def test_a_folder_names_the_files_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    assert f"{folder} is a folder: it has no *.safetensors" in resumed_from(tmp_path, folder)
    (folder / "adapters.safetensors").touch()
    assert f"{folder} is a folder: name the file in it: adapters.safetensors" in resumed_from(tmp_path, folder)


def test_a_file_on_another_volume_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    outside = weights(tmp_path / "a.safetensors", 2)
    message = resumed_from(tmp_path / "root", outside)
    assert f"{outside} lies outside of the allowed directories" in message and "[preflight] roots" in message
    assert resumed_from(tmp_path, outside) == "None"


def test_weights_of_a_full_fine_tuning_are_distinguished_from_adapters(tmp_path: Path, saving: Config) -> None:
    path = tensors(tmp_path / "full.safetensors", {"model.layers.2.mlp.up_proj.weight": [4, 4]})
    found = AdapterWeights.model_validate(storage.adapter(path))
    assert (found.kind, found.layers) == ("full", [2])
    assert check.resume_mismatches(found, saving, 4)[0].startswith("holds weights of full, and the job trains lora")


def test_an_adapter_of_peft_is_for_torch_and_one_of_mlx_lm_is_not(tmp_path: Path, saving: Config) -> None:
    names = {f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight": [8, 64] for layer in (2, 3)}
    peft = AdapterWeights.model_validate(storage.adapter(tensors(tmp_path / "a.safetensors", names)))
    assert (peft.kind, peft.ranks, peft.layers, peft.modules) == ("lora", [8], [2, 3], ["self_attn.q_proj"])
    magnitudes = {name.replace("lora_A.weight", "lora_magnitude_vector"): [64] for name in names}
    assert storage.adapter(tensors(tmp_path / "b.safetensors", names | magnitudes))["kind"] == "dora"
    ours = AdapterWeights.model_validate(storage.adapter(weights(tmp_path / "c.safetensors", 2, 3)))
    torch = saving.model_copy(update={"job": saving.job.model_copy(update={"framework": "torch"})})
    assert check.resume_mismatches(peft, torch, 4) == check.resume_mismatches(ours, saving, 4) == []
    (message,) = check.resume_mismatches(ours, torch, 4)
    assert message.startswith("holds an adapter of mlx-lm, which framework = 'torch' cannot continue")
    (message,) = check.resume_mismatches(peft, saving, 4)
    assert message.startswith("holds an adapter of peft, which framework = 'mlx' cannot continue")


def test_a_whole_model_of_torch_has_more_layers_than_are_trained(tmp_path: Path, saving: Config) -> None:
    names = {f"model.layers.{layer}.mlp.up_proj.weight": [4, 4] for layer in range(4)}
    found = AdapterWeights.model_validate(storage.adapter(tensors(tmp_path / "whole.safetensors", names)))
    full = saving.model_copy(update={"job": saving.job.model_copy(update={"fine_tune_type": "full"})})
    assert check.resume_mismatches(found, full, 4)[0].startswith("has layers 0 to 3")
    torch = full.model_copy(update={"job": full.job.model_copy(update={"framework": "torch"})})
    assert check.resume_mismatches(found, torch, 4) == []


def test_too_little_room_names_the_largest_of_earlier_runs(tmp_path: Path) -> None:
    for name, size in (("small", 10), ("large", 100_000)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "adapters.safetensors").write_bytes(bytes(size))
    asked: dict[str, Any] = {
        "workdir": "/",
        "directory": str(tmp_path),
        "roots": [str(tmp_path)],
        "runs": str(tmp_path / "runs"),
    }
    asked |= {"states": None, "resume": None}
    message = storage.probe_storage(json.dumps({**asked, "needed": 1 << 60}))
    assert [Path(folder).name for folder, _ in message["largest"]] == ["large", "small"]
    assert message["largest"][0][1] >= 100_000
    assert storage.probe_storage(json.dumps({**asked, "needed": 0}))["largest"] == []


async def test_a_volume_that_loses_with_the_power_what_it_has_taken_is_a_warning(
    saving: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> int:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    share = tmp_path / "share"
    share.mkdir()
    asked: dict[str, Any] = {
        "workdir": "/",
        "directory": str(tmp_path),
        "roots": [str(tmp_path)],
        "states": str(share / "run"),
    }
    asked |= {"runs": str(tmp_path), "resume": None, "needed": 0}
    assert storage.probe_storage(json.dumps(asked))["not_durable"] is None
    monkeypatch.setattr(attempt, "_FULL_SYNC", 51)
    monkeypatch.setattr("fcntl.fcntl", unsupported)
    seen = CheckpointStorage.model_validate(storage.probe_storage(json.dumps(asked)))
    assert (seen.fault, seen.not_durable) == (None, str(share))
    found = Findings("checkpoint_layer", saving)
    check.evaluate(found.on(saving.nodes[0]), seen, check.SaveSize(1), saving)
    result = found.verdict()
    assert result.status is CheckStatus.WARN and "has no F_FULLFSYNC" in result.summary


async def test_a_destination_that_cannot_be_written_is_named_before_the_launch(saving: Config, tmp_path: Path) -> None:
    (tmp_path / "share").write_text("no folder")
    named = {"checkpoint": CheckpointConfig(destination=str(tmp_path / "share"))}
    result = await run_check(check.run, saving.model_copy(update=named))
    assert result.status is CheckStatus.FAIL and f"{tmp_path / 'share'} is a file" in result.summary


async def test_a_model_of_another_kind_leaves_the_size_open_and_says_why(saving: Config, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "of-tomorrow"}))
    result = await run_check(check.run, saving)
    assert (result.status, "size of a save not known" in result.summary) == (CheckStatus.PASS, True)
    assert "of-tomorrow" in result.evidence["node0"]
