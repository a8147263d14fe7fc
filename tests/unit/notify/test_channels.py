"""Every channel of [notify], on a server and programs of this machine."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.config.models import Config, NotifyConfig, WebhookConfig
from engine.notify import channels
from engine.notify.channels import queue_empty, send_to_all
from engine.snapshots import ChannelAnswer, Notification
from tests.unit.notify.receiver import Receiver, receiver
from tests.unit.run.run_maker import make_run_config

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FAILURE = Notification("failure", "<night> hat gelöst", "exited & ended", AT, "run-1")


def configured(tmp_path: Path, **notify: Any) -> Config:
    return make_run_config().model_copy(update={"file": tmp_path / "flightdeck.toml", "notify": NotifyConfig(**notify)})


def hook(url: str, **more: Any) -> dict[str, Any]:
    return {"webhooks": (WebhookConfig(url=url, **more),)}


def answer(config: Config, notification: Notification = FAILURE) -> ChannelAnswer:
    (only,) = send_to_all(config, notification)
    return only


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(channels, "_PAUSES_S", (0.0, 0.0, 0.0))
    with receiver() as taken:
        yield taken


def test_each_format_is_the_services(server: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NTFY_ACCESS", "abc-123456")
    for form in ("json", "slack", "discord"):
        assert answer(configured(tmp_path, **hook(server.url, format=form))).answer == "127.0.0.1 answered 200"
    sent = [json.loads(body) for body in server.bodies]
    assert sent == [
        {
            "event": "failure",
            "title": FAILURE.title,
            "text": FAILURE.text,
            "run": "run-1",
            "at": "2026-01-02T03:04:05+00:00",
        },
        {"text": "*&lt;night&gt; hat gelöst*\nexited &amp; ended"},
        {"content": "**<night> hat gelöst**\nexited & ended", "allowed_mentions": {"parse": []}},
    ]
    answer(configured(tmp_path, **hook(server.url, format="ntfy", token="env:NTFY_ACCESS")))
    path, headers, body = server.requests[-1]
    assert (path, body, headers["Priority"]) == ("/topic-4711", b"exited & ended", "4")
    assert headers["Authorization"] == "Bearer abc-123456"
    assert headers["Title"] == "=?UTF-8?B?PG5pZ2h0PiBoYXQgZ2Vsw7ZzdA==?="


def test_a_fault_of_the_server_is_tried_three_times_and_a_refusal_once(server: Receiver, tmp_path: Path) -> None:
    config = configured(tmp_path, **hook(server.url))
    server.answers += [500, 429]
    assert (answer(config).sent, len(server.requests)) == (True, 3)
    server.answers += [503, 503, 503]
    assert (answer(config).sent, len(server.requests)) == (False, 6)
    server.answers += [400]
    assert (answer(config).sent, len(server.requests)) == (False, 7)


def test_a_redirect_is_not_followed(server: Receiver, tmp_path: Path) -> None:
    server.answers += [307]
    why = "127.0.0.1 answered 307: a redirect, which is not followed"
    assert answer(configured(tmp_path, **hook(server.url))) == ChannelAnswer("webhook 1", False, why)
    assert len(server.requests) == 1


def test_a_server_that_never_answers_and_one_that_is_not_there_are_given_up(
    server: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_HTTP_LIMIT_S", 0.2)
    server.silent = threading.Event()
    late = answer(configured(tmp_path, **hook(server.url)))
    assert late == ChannelAnswer("webhook 1", False, "127.0.0.1 took it perhaps: no answer within 0 s")
    assert len(server.requests) == 1, "it has come"
    monkeypatch.setattr(channels, "_TOTAL_LIMIT_S", 0.1)
    monkeypatch.setattr(channels, "_HTTP_LIMIT_S", 60.0)
    assert answer(configured(tmp_path, **hook(server.url))).answer == "no answer within 0 s"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(channels, "_TOTAL_LIMIT_S", 45.0)
    refused = answer(configured(tmp_path, **hook(f"http://127.0.0.1:{port}/x")))
    assert refused.answer == "127.0.0.1 cannot be reached: Connection refused"


@pytest.mark.parametrize("status", [400, 500])
def test_secrets_are_in_no_answer(
    server: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("WHERE", server.url)
    monkeypatch.setenv("WHOM", "of-the-token-4712")
    server.answers += [status] * 3
    shown = answer(configured(tmp_path, **hook("env:WHERE", token="env:WHOM"))).answer
    assert shown.startswith(f"127.0.0.1 answered {status}: refused")
    assert "4712" not in shown
    monkeypatch.setenv("WHOM", "of-the-token\n4712")
    shown = answer(configured(tmp_path, **hook(server.url, token="env:WHOM"))).answer
    assert shown == "its url or token has characters that HTTP does not allow"
    monkeypatch.delenv("WHERE")
    shown = answer(configured(tmp_path, **hook("env:WHERE"))).answer
    assert shown == "the variable WHERE is not set in the environment that launched"
    monkeypatch.setenv("WHERE", "ftp://ana:4713@host/")
    shown = answer(configured(tmp_path, **hook("env:WHERE"))).answer
    assert shown == "the value of env:WHERE is no http:// or https:// address"


def test_a_command_gets_the_event_and_what_it_leaves_running_is_not_awaited(tmp_path: Path) -> None:
    script = 'cat > got.json; printf %s "$FLIGHTDECK_TITLE" > title; sleep 300 & echo $! > child'
    try:
        assert answer(configured(tmp_path, command=("sh", "-c", script))) == ChannelAnswer("command", True, "sh ran")
        assert json.loads((tmp_path / "got.json").read_text())["event"] == "failure"
        assert (tmp_path / "title").read_text() == FAILURE.title
    finally:
        os.kill(int((tmp_path / "child").read_text()), 9)


def test_a_command_that_fails_is_missing_or_never_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = answer(configured(tmp_path, command=("sh", "-c", "echo no network >&2; exit 3")))
    assert failed == ChannelAnswer("command", False, "sh ended with 3: no network")
    assert answer(configured(tmp_path, command=("/nowhere/tell",))).answer == (
        "tell cannot be started: No such file or directory"
    )
    monkeypatch.setattr(channels, "_COMMAND_LIMIT_S", 0.1)
    assert answer(configured(tmp_path, command=("sleep", "300"))).answer == (
        "sleep had not ended after 0 s, and was killed"
    )


@pytest.mark.parametrize("name", ["osascript", "notify-send"])
def test_the_desktop_gets_title_and_text_as_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / name
    program.write_text(f"#!/bin/sh\nprintf '%s|' \"$@\" > {tmp_path}/words\n")
    program.chmod(0o700)
    assert answer(configured(tmp_path, desktop=True)) == ChannelAnswer("desktop", True, f"{name} ran")
    assert (tmp_path / "words").read_text().endswith(f"|{FAILURE.title}|{FAILURE.text}|")


def test_a_machine_without_either_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert answer(configured(tmp_path, desktop=True)).answer == (
        "this machine has neither osascript (macOS) nor notify-send"
    )


@pytest.mark.parametrize(("delivers", "sent"), [(True, True), (False, False)])
def test_apprise_gets_the_address_of_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delivers: bool, sent: bool
) -> None:
    calls: list[Any] = []

    class Apprise:
        def add(self, address: str) -> bool:
            calls.append(address)
            return True

        def notify(self, **texts: str) -> bool:
            calls.append(texts)
            return delivers

    module = ModuleType("apprise")
    module.Apprise = Apprise  # type: ignore[attr-defined]
    monkeypatch.setattr(channels, "_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setenv("CHAT", "tgram://123/456")
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert "pip install 'mlx-flightdeck[notify]'" in answer(configured(tmp_path, apprise=("env:CHAT",))).answer
    monkeypatch.setitem(sys.modules, "apprise", module)
    assert answer(configured(tmp_path, apprise=("env:CHAT",))).sent is sent
    assert calls[:2] == ["tgram://123/456", {"title": FAILURE.title, "body": FAILURE.text}]


def test_a_fault_of_a_library_is_named_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise RuntimeError("tgram://123/s3cret")

    monkeypatch.setattr(channels, "_call_apprise", fail)
    assert answer(configured(tmp_path, apprise=("env:CHAT",))) == ChannelAnswer("apprise 1", False, "RuntimeError")


def test_an_empty_queue_is_told_where_it_is_wanted(server: Receiver, tmp_path: Path) -> None:
    assert queue_empty(tmp_path, configured(tmp_path, on=("end",), **hook(server.url))) == []
    assert [sent.sent for sent in queue_empty(tmp_path, configured(tmp_path, **hook(server.url)))] == [True]
    (body,) = server.bodies
    assert json.loads(body)["event"] == "queue_empty"
