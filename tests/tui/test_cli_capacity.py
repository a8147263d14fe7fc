"""`flightdeck plan --longest` and `--largest-batch`: by path, by a name on the Hub, with a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from tests.tui.commands import flightdeck
from tests.unit.plan.clusters import QWEN3_4B, QWEN3_32B

MAC = ("--memory", "128")


class Hub(BaseHTTPRequestHandler):
    """Has config.json of one model, for whoever has the token, and moves to it from the model's former name."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        content = json.dumps(QWEN3_32B).encode()
        if self.path == "/Qwen/old/resolve/main/config.json":
            self.send_response(307)
            self.send_header("Location", "/Qwen/Qwen3-32B/resolve/main/config.json")
            content = b""
        elif self.path != "/Qwen/Qwen3-32B/resolve/main/config.json":
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            content = b""
        elif self.headers["Authorization"] != "Bearer hf_right":
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            content = b""
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def use_endpoint(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """As HF_ENDPOINT, which the library reads when it is imported; other tests may have set HF_HUB_OFFLINE by then."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    use_endpoint(monkeypatch, server.server_port)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    Hub.asked.clear()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_by_its_name_on_the_hub_only_config_json_is_fetched(home: Path, tmp_path: Path, hub: type[Hub]) -> None:
    done = flightdeck(home, "plan", "--longest", "--model", "Qwen/old", *MAC, cwd=tmp_path, accept=False)
    assert done.code == 0, done.err
    assert done.out.startswith("Qwen/old, made for 40,960 tokens\n")
    assert "Mac, 128 GB  full    bfloat16  none fits" in done.out
    names = ("old", "Qwen3-32B")
    assert hub.asked == [(f"/Qwen/{name}/resolve/main/config.json", "Bearer hf_right") for name in names]


def test_what_the_hub_refuses_is_said_in_one_line(
    home: Path, tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = flightdeck(home, "plan", "--longest", "--model", "Qwen/none", *MAC, cwd=tmp_path)
    assert done.code == 2 and done.err.startswith("flightdeck: Qwen/none has no config.json that can be read: 404")
    assert done.err.endswith("or OWNER/NAME of the Hub, with HF_TOKEN where it asks who you are)\n")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    done = flightdeck(home, "plan", "--longest", "--model", "Qwen/Qwen3-32B", *MAC, cwd=tmp_path)
    assert done.code == 2 and "403 Client Error" in done.err and "hf_wrong" not in done.err
    use_endpoint(monkeypatch, 9)
    done = flightdeck(home, "plan", "--longest", "--model", "Qwen/Qwen3-32B", *MAC, cwd=tmp_path)
    assert done.code == 2 and "Connection refused" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("name", ["model", "model/config.json"])
def test_by_its_path_as_one_document(home: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN3_4B))
    done = flightdeck(home, "plan", "--largest-batch", "--json", "--model", name, *MAC, cwd=tmp_path)
    document = json.loads(done.out)
    assert (done.code, document["longest"], document["sequence"], document["made_for"]) == (0, None, 2048, 40_960)
    rows = {row["method"]: row for row in document["largest_batch"]}
    assert list(rows) == ["lora", "dora", "full", "qlora"]
    for row in rows.values():
        assert row["amount"] > 8 and row["memory"]["needed_bytes"] <= row["memory"]["limit_bytes"] == 96 * 2**30
        assert row["settings"]["moments"] in ("float32", "bfloat16", "8bit")


def test_with_a_configuration_its_nodes_and_its_job_are_asked(home: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN3_4B | tiny))
    nodes = "".join(f'[[node]]\nname = "{name}"\n' for name in ("one", "two"))
    (tmp_path / "flightdeck.toml").write_text(f'{nodes}[job]\nmodel = "model"\ndata = "d"\nmax_seq_length = 64\n')
    done = flightdeck(home, "plan", "--longest", "--largest-batch", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "longest sequence, one per rank\n" in done.out and "one, two  lora    bfloat16  256     " in done.out
    assert "largest batch of a rank, of 64 tokens each\n" in done.out


def test_nothing_that_fits_is_1_and_what_cannot_be_asked_is_2(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "list.json").write_text("[1]")
    done = flightdeck(home, "plan", "--longest", "--model", "config.json", "--memory", "4", cwd=tmp_path)
    assert done.code == 1 and done.out.count("none fits") == 4
    for arguments, why in (
        (("--longest",), "there is no job: no flightdeck.toml (name a model: --model)"),
        (("--longest", "--model", "list.json"), "the model is not known: list.json is no JSON object"),
        (("--longest", "--model", "nowhere"), "nowhere has no config.json that can be read: [Errno 2]"),
        (("--model", "config.json"), "--model and --memory are for --longest and --largest-batch"),
        (("--longest", "--memory", "much"), "argument --memory: "),
    ):
        done = flightdeck(home, "plan", *arguments, cwd=tmp_path)
        assert done.code == 2 and why in done.err, done.err
