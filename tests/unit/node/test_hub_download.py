"""Downloads by the node's own huggingface_hub, from a Hub of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.node.hub_cache import snapshots
from engine.protocol.manifest import HubName
from tests.hub_server import Hub, hub
from tests.model_copies import COMMIT
from tests.model_files import llama_files

TINY = HubName("model", "org/tiny")
FILES = {**llama_files(), "figure.png": b"x" * 1000}


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths of the files that the Hub has sent."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with hub(FILES) as (endpoint, sent):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield sent


def answer(**asked: object) -> dict[str, Any]:
    request = json.dumps({"repository": TINY, **asked})
    command = [sys.executable, "-m", "engine.node.probes", "hub", request]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        last: dict[str, Any] = json.loads([*process.stdout][-1])
    return last


def test_a_model_is_looked_up_and_downloaded_once(tmp_path: Path, sent: list[str]) -> None:
    about = answer(get=False)
    assert (about["commit"], about["bytes"]) == (COMMIT, sum(map(len, llama_files().values())))
    got = answer(get=True)
    (snapshot,) = snapshots(tmp_path / "hf" / "hub", TINY)
    assert (got, snapshot.refs) == ({"path": str(snapshot.path)}, ("main",))
    assert {path.name: path.read_bytes() for path in snapshot.files()} == llama_files()
    assert answer(get=True) == got
    assert len(sent) == len(llama_files())


def test_the_begin_of_its_largest_file_measures_the_way_to_the_hub(sent: list[str]) -> None:
    about = answer(get=False, sample=1000)
    assert about["bytes"] == sum(map(len, llama_files().values())) and about["rate"] > 0
    largest = max(llama_files().items(), key=lambda file: len(file[1]))[0]
    assert [path.rpartition("/")[2] for path in sent] == [largest]


def test_a_sample_that_is_cut_off_is_no_reason_against_a_machine(
    sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: Hub, code: int, body: bytes, headers: Mapping[str, str], *, content: bool) -> None:
        if self.headers.get("Range") is None:
            send(self, code, body, headers, content=content)
            return
        self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\ncut")
        self.close_connection = True

    send = Hub._send
    monkeypatch.setattr(Hub, "_send", cut)
    about = answer(get=False, sample=1000)
    assert (about["commit"], about["rate"]) == (COMMIT, 0)


def test_offline_is_respected_and_told(sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "ffline" in answer(get=False)["problem"]
    assert not sent
