"""`flightdeck publish --hub`, by the real huggingface_hub and hf_xet, on a server that breaks off in the middle."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from huggingface_hub import ModelCard

from tests.model_files import safetensors
from tests.tui.commands import Done, flightdeck
from tests.unit.publish.conftest import WriteModel
from tests.unit.publish.hub_server import SIGNATURE, TOKEN, Hub, hub

REPOSITORY = "ana/support-lora"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The library's retries take no time."""
    with hub() as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None, time=time.time))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
        monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
        log = logging.StreamHandler(io.StringIO())
        logging.getLogger("huggingface_hub").addHandler(log)
        yield served
        logging.getLogger("huggingface_hub").removeHandler(log)
        assert not re.search(f"{TOKEN}|{SIGNATURE}", log.stream.getvalue())


def publish(home: Path, run: str, folder: Path, *more: str) -> Done:
    done = flightdeck(home, "publish", run, "--from", str(folder), "--hub", REPOSITORY, *more)
    for text in (done.out, done.err, *(path.read_text() for path in home.rglob("*.jsonl"))):
        assert TOKEN not in text
        assert SIGNATURE not in text
    return done


def test_an_adapter_is_uploaded_with_its_card_and_nothing_else(
    server: Hub, home: Path, run: str, adapter: Path
) -> None:
    done = publish(home, run, adapter, "--private", "--base-model", "Qwen/Qwen3-0.6B")
    assert (done.code, done.err) == (0, ""), done
    assert done.out.startswith(f"published {server.url}/{REPOSITORY}/commit/")
    digest = hashlib.sha256((adapter / "adapters.safetensors").read_bytes()).hexdigest()
    files = server.files[REPOSITORY]
    assert {*files} == {"README.md", "adapter_config.json", "adapters.safetensors"}
    assert files["adapters.safetensors"] == (digest, (adapter / "adapters.safetensors").stat().st_size)
    assert server.blocks and server.shards, "the weights have gone by Xet"
    assert server.visibility[REPOSITORY] == "private"
    assert server.tokens - {None} == {TOKEN}
    small = server.small_files(REPOSITORY)
    parameters = {"rank": 2, "scale": 20.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters, "model": "Qwen/Qwen3-0.6B"}
    assert json.loads(small["adapter_config.json"]) == config, "and no paths"
    card = ModelCard(small["README.md"].decode())
    assert (card.data.get("base_model"), card.data.get("library_name")) == ("Qwen/Qwen3-0.6B", "mlx")
    assert "These weights were saved at iteration 20." in card.text
    assert f"SHA-256 {digest}" in card.text
    assert 'mlx_lm.generate --prompt "..." --model Qwen/Qwen3-0.6B --adapter-path adapter' in card.text
    assert not re.search(f"{TOKEN}|/Users/|of-the-job", card.content)


def test_an_upload_that_breaks_off_is_completed_by_the_same_command(
    server: Hub, home: Path, run: str, adapter: Path
) -> None:
    server.break_at = "POST .*/commit/"
    broken = publish(home, run, adapter)
    assert (broken.code, broken.out) == (1, ""), broken
    assert broken.err.splitlines()[-1] == (
        f"flightdeck: {REPOSITORY}: the upload did not complete: Server disconnected without sending a response. "
        "(run the same command again: what has arrived is not sent twice)"
    )
    assert server.blocks and not server.files[REPOSITORY]
    sent, server.break_at = dict(server.blocks), None
    server.requests.clear()
    done = publish(home, run, adapter, "--json")
    assert json.loads(done.out)["url"].startswith(f"{server.url}/{REPOSITORY}/commit/")
    assert [path for _, path in server.requests if "/xorbs/" in path] == [], "the weights had arrived"
    assert (server.blocks, {*server.files[REPOSITORY]}) == (
        sent,
        {"README.md", "adapter_config.json", "adapters.safetensors"},
    )


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # The library's own.
def test_without_xet_a_file_that_has_arrived_is_not_sent_twice(
    server: Hub, home: Path, run: str, write_model: WriteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    model = write_model()
    (model / "model-2.safetensors").write_bytes(safetensors({"model.more": (2, 2)}))
    second = hashlib.sha256((model / "model-2.safetensors").read_bytes()).hexdigest()
    server.break_at = f"PUT /lfs/{second}"
    broken = publish(home, run, model)
    assert broken.code == 1, broken
    arrived, server.break_at = dict(server.objects), None
    server.requests.clear()
    assert len(arrived) == 1 and publish(home, run, model).code == 0
    assert [path for method, path in server.requests if method == "PUT"] == [f"/lfs/{second}"]
    assert {"model.safetensors", "model-2.safetensors"} < {*server.files[REPOSITORY]}


def test_no_weights_of_an_earlier_upload_are_left_beside_those_of_a_later_one(
    server: Hub, home: Path, run: str, write_model: WriteModel
) -> None:
    model = write_model()
    assert publish(home, run, model).code == 0
    uploaded = dict(server.files[REPOSITORY])
    stale = ("model-00002-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json")
    kept = ("onnx/model.safetensors", "notes.txt")
    server.files[REPOSITORY].update(dict.fromkeys((*stale, *kept), b"old"))
    assert publish(home, run, model).code == 0
    assert server.files[REPOSITORY] == {**uploaded, **dict.fromkeys(kept, b"old")}


def test_what_is_not_here_is_fetched_first(server: Hub, home: Path, run: str, tmp_path: Path) -> None:
    done = flightdeck(home, "publish", run, "--hub", REPOSITORY, "--json", cwd=tmp_path)
    assert (done.code, json.loads(done.out)["folder"]) == (0, None), done
    assert {*server.files[REPOSITORY]} == {"README.md", "adapter_config.json", "adapters.safetensors"}
    assert (tmp_path / run / "adapters.safetensors").is_file()


def test_what_is_to_be_private_is_not_uploaded_to_a_public_repository(
    server: Hub, home: Path, run: str, adapter: Path
) -> None:
    server.files[REPOSITORY], server.visibility[REPOSITORY] = {}, "public"
    done = publish(home, run, adapter, "--private")
    assert (done.code, server.files[REPOSITORY]) == (2, {}), done
    assert done.err == f"flightdeck: {REPOSITORY}: the repository is public (make it private on the Hub first)\n"


def test_the_hubs_refusal_is_one_line_without_the_token(server: Hub, home: Path, run: str, adapter: Path) -> None:
    server.refuse = 403
    done = publish(home, run, adapter)
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1), done
    assert done.err.endswith("(log in with a token that may write: hf auth login, or HF_TOKEN)\n")


def test_nobody_who_is_not_logged_in_asks_the_hub(
    server: Hub, home: Path, run: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is fetched for it, too."""
    monkeypatch.delenv("HF_TOKEN")
    for done in (publish(home, run, adapter), flightdeck(home, "publish", run, "--hub", REPOSITORY)):
        assert (done.code, server.requests) == (2, []), done
        assert done.err.startswith("flightdeck: nobody is logged in to the Hub: HF_TOKEN is not set (log in")


@pytest.mark.parametrize("name", ["support", "ana/", "../x", "ana/a b", "ana/x/y", "ana/a--b"])
def test_no_other_name_reaches_the_hub(server: Hub, home: Path, run: str, adapter: Path, name: str) -> None:
    done = flightdeck(home, "publish", run, "--from", str(adapter), "--hub", name)
    assert (done.code, server.requests) == (2, [])
    assert "is no repository's name (give OWNER/NAME)" in done.err
