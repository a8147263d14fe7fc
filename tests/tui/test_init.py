"""flightdeck init as a shell and as a person see it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from engine.cluster.discovery import FoundPython
from engine.config.draft import PYTHON_GUESS
from engine.config.load import load_config
from engine.models import HostKeyOffer
from tests.terminal import Terminal
from tests.tui.commands import FLIGHTDECK, Done, environment, flightdeck
from tui.commands.init import init as init_command

CLOSED_PORT = 9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a folder of this test's own, an ssh configuration with two hosts, and no Bonjour."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLIGHTDECK_BONJOUR", "off")
    config = tmp_path / "ssh_config"
    config.write_text(f"Host gone\n HostName 127.0.0.1\n Port {CLOSED_PORT}\n User ana\nHost *.lab\n User x\n")
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(config))
    path = tmp_path / "studio one"
    path.mkdir()
    return path


def init(folder: Path, *arguments: str) -> Done:
    return flightdeck(folder.parent / "state", "init", *arguments, cwd=folder)


def test_this_machine_gives_a_file_that_loads_and_says_what_comes_next(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data/train.jsonl").write_text("")
    done = init(folder, "127.0.0.1")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("wrote flightdeck.toml: 1 node\n")
    assert "mlx-lm " in done.out
    assert "edit flightdeck.toml: [job] model\n" in done.out
    assert [line for line in ("flightdeck nodes", "flightdeck preflight") if line not in done.out] == []
    config = load_config(folder / "flightdeck.toml")
    assert config.cluster.name == "studio-one"
    assert [(node.ssh, node.python) for node in config.nodes] == [("127.0.0.1", sys.executable)]
    assert config.job.mlx_lm["data"] in ("data", str(folder / "data"))


def test_the_job_is_given_by_options_and_nothing_is_asked(folder: Path) -> None:
    words = ("--model", "org/m", "--data", "~/d", "--method", "full", "--iters", "5", "--yes")
    done = init(folder, "127.0.0.1", *words)
    assert (done.code, done.err) == (0, "")
    assert "edit flightdeck.toml" not in done.out
    job = load_config(folder / "flightdeck.toml").job
    assert (job.model, job.data, job.fine_tune_type, job.mlx_lm["iters"]) == ("org/m", "~/d", "full", 5)


@pytest.mark.parametrize(("option", "text"), [("model", "../m"), ("data", "hf:")])
def test_what_cannot_be_a_model_or_data_is_refused_before_a_host_is_asked(folder: Path, option: str, text: str) -> None:
    done = init(folder, "nobody@no.such.host.invalid", f"--{option}", text, "--yes")
    assert (done.code, done.err.startswith(f"flightdeck: --{option} '{text}': expected ")) == (2, True)
    assert "no.such.host" not in done.err


def test_a_file_in_the_way_is_left_alone_unless_forced(folder: Path) -> None:
    (folder / "flightdeck.toml").write_text("mine")
    refused = init(folder, "127.0.0.1")
    assert refused.code == 2
    assert refused.err == (
        "flightdeck: flightdeck.toml already exists (--force overwrites it, -o FILE writes another file)\n"
    )
    assert (folder / "flightdeck.toml").read_text() == "mine"
    assert init(folder, "127.0.0.1", "--force").code == 0
    assert "[cluster]" in (folder / "flightdeck.toml").read_text()
    printed = init(folder, "127.0.0.1", "-o", "-", "--name", "lab")
    assert json.loads(init(folder, "127.0.0.1", "-o", "-", "--json").out)["nodes"]
    into_folder = init(folder, "127.0.0.1", "-o", ".", "--force")
    assert (into_folder.code, into_folder.err) == (2, "flightdeck: . already exists (-o FILE writes another file)\n")
    nowhere = init(folder, "-o", "none/flightdeck.toml")
    expected = "flightdeck: none/flightdeck.toml: cannot be written: No such file or directory\n"
    assert (nowhere.code, nowhere.out, nowhere.err) == (1, "", expected), "before a host is chosen"
    before = (folder / "flightdeck.toml").read_text()
    faulty = init(folder, "127.0.0.1", "--force", "--model", "../model")
    assert faulty.code == 2 and "without .." in faulty.err and (folder / "flightdeck.toml").read_text() == before
    assert (printed.code, printed.out) == (0, (folder / "flightdeck.toml").read_text().replace("studio-one", "lab"))


def test_without_hosts_and_without_a_terminal_it_lists_and_asks_for_a_choice(folder: Path) -> None:
    listed = init(folder)
    assert listed.code == 2
    assert "user ana, at 127.0.0.1" in listed.out and "this machine" in listed.out
    assert "flightdeck init ana@ultra.local" in listed.err
    document = json.loads(init(folder, "--from-ssh-config", "--json").out)
    assert document["file"] is None
    assert [host["ssh"] for host in document["found"]] == ["127.0.0.1", "gone"]
    assert not (folder / "flightdeck.toml").exists()


def test_hosts_that_do_not_answer_are_written_down_as_not_verified(folder: Path) -> None:
    done = init(folder, "gone", "127.0.0.1", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    gone, here = document["nodes"]
    assert gone["python"] is None and gone["problem"] and here["python"] == sys.executable
    assert document["text"] == (folder / "flightdeck.toml").read_text()
    assert f"NOT VERIFIED: {gone['problem']}" in document["text"]
    assert [node.name for node in load_config(folder / "flightdeck.toml").nodes] == ["gone", here["name"]]


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a\n$(id)"])
def test_hostile_hosts_are_refused_before_anything_is_asked(folder: Path, host: str) -> None:
    done = init(folder, "--", host)
    assert done.code == 2
    assert "is not a host" in done.err and len(done.err.splitlines()) == 1
    assert not (folder / "flightdeck.toml").exists()


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ('{"backend": "ring", "hosts": [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "127.0.0.1"}]}', "ring"),
        ("# two ranks here\n127.0.0.1:2\n", "auto"),
    ],
)
def test_a_hostfile_is_taken_over(folder: Path, text: str, backend: str) -> None:
    (folder / "hosts").write_text(text)
    done = init(folder, "--hostfile", "hosts")
    assert done.code == 0, done.err
    config = load_config(folder / "flightdeck.toml")
    assert config.cluster.backend == backend
    assert [node.python for node in config.nodes] == [sys.executable] * 2
    (folder / "hosts").write_text("a b c d")
    wrong = init(folder, "--hostfile", "hosts", "--force")
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err.startswith("hosts: line 1")


def test_at_a_terminal_a_person_chooses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    env = environment(folder.parent / "state")
    with Terminal([FLIGHTDECK, "init", "--from-ssh-config"], env=env) as terminal:
        terminal.read_until(b"empty: none)? ")
        terminal.press(b"7\r")
        terminal.read_until(b"numbers from 1 to 2")
        terminal.press(b"1\r")
        terminal.read_until(b"model (")
        terminal.press(b"../m\r")
        terminal.read_until(b"a path without ..")
        terminal.press(b"~/m\r")
        terminal.read_until(b"data (")
        terminal.press(b"hf:\r")
        terminal.read_until(b"hf:org/set")
        terminal.press(b"\x04")
        for answer in (b"qlora\r", b"dora\r"):
            terminal.read_until(b"method (")
            terminal.press(answer)
        assert terminal.wait() == 0
    config = load_config(folder / "flightdeck.toml")
    assert (len(config.nodes), config.job.model, config.job.fine_tune_type) == (1, "~/m", "dora")
    (folder / "flightdeck.toml").unlink()
    for leave, code in ((b"\r", 2), (b"\x04", 2), (None, 130)):
        with Terminal([FLIGHTDECK, "init", "--from-ssh-config"], env=env) as terminal:
            terminal.read_until(b"empty: none)? ")
            if leave is not None:
                terminal.press(leave)
            assert (terminal.wait() if leave is not None else terminal.interrupt()) == code
    assert not (folder / "flightdeck.toml").exists()


class KeyedHost:
    """An engine whose one host shows a key, and is asked only once that is accepted."""

    def __init__(self) -> None:
        self.nodes = self.setup = self
        self.offer = HostKeyOffer(target="ana@ultra", key="ssh-ed25519 AAAA", fingerprint="SHA256:ultra")
        self.accepted: list[HostKeyOffer] = []

    async def __aenter__(self) -> KeyedHost:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def find_pythons(self, hosts: list[str]) -> list[FoundPython]:
        if self.accepted:
            return [FoundPython("/opt/mlx/bin/python", "python 3.12", hostname="ultra.local") for _ in hosts]
        return [FoundPython(None, problem="its host key is unknown", host_key=self.offer) for _ in hosts]

    async def accept_host_key(self, offer: HostKeyOffer) -> None:
        self.accepted.append(offer)

    def config(self, path: Path, text: str) -> Any:
        return load_config(path, text=text)

    def accept(self, digest: str) -> None: ...


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_host_key_is_asked_for_and_its_host_asked_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    engine, file = KeyedHost(), folder / "flightdeck.toml"
    monkeypatch.setattr("tui.commands.init.is_person", lambda stream: True)
    monkeypatch.setattr("builtins.input", lambda: answer)
    options = argparse.Namespace(
        hosts=["ana@10.0.0.7"], output=file, force=False, hostfile=None, from_ssh_config=False, bonjour=False, name=None
    )
    vars(options).update({"json": False, "yes": False, "trust": [], "iters": None})
    vars(options).update(dict.fromkeys(("model", "data", "method"), "lora"))
    assert init_command(options, cast(Any, engine)) == 0
    (node,) = load_config(file).nodes
    expected = ("ultra", "/opt/mlx/bin/python") if answer == "y" else ("node0", PYTHON_GUESS)
    assert (node.name, node.python) == expected
    assert ("NOT VERIFIED" in file.read_text()) == (answer == "n")
