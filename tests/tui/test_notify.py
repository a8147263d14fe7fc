"""Notifications in the console and by `flightdeck notify test`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.models import NotifyConfig
from engine.snapshots import ChannelAnswer, Notification
from tests.tui import fake_engine, macs
from tests.tui.commands import flightdeck
from tests.tui.conftest import opened
from tests.tui.fake_engine import FakeEngine
from tests.unit.notify.receiver import receiver


async def test_a_terminal_rings_at_a_new_notification_and_a_channel_that_fails_is_a_notice(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = macs.configuration(2).model_copy(update={"notify": NotifyConfig(terminal=True)})
    past = Notification("recovery", "night goes on", "attempt 2", fake_engine.NOW)
    new = replace(past, event="stall", title="night has shown no step", text="for 40 s")
    fake.add(going := replace(fake_engine.running(), notifications=(past,)))
    fake.answers = [ChannelAnswer("webhook 1", True, "ntfy.sh answered 200")]
    async with opened(fake, follow=going.record.id, config=config) as console:
        await console.until(lambda: console.app.state.snapshot is not None)
        written: list[str] = []
        assert console.app._driver is not None
        monkeypatch.setattr(console.app._driver, "write", written.append)
        fake.put(replace(going, notifications=(past, new)))
        await console.until(lambda: bool(written))
        fake.put(replace(going, notifications=(past, replace(new, problems=("webhook 1: refused",)))))
        await console.until(lambda: console.notifications == ["stall was not told by webhook 1: refused"])
        assert written == ["\x1b]9;night has shown no step: for 40 s\x07\a"]
        await console.press("ctrl+t")
        await console.until(lambda: "webhook 1: ntfy.sh answered 200" in console.notifications)


async def test_without_a_channel_the_key_says_so(fake: FakeEngine) -> None:
    async with opened(fake, config=macs.configuration(2)) as console:
        await console.until(lambda: console.app.state.ready)
        await console.press("ctrl+t")
        await console.until(lambda: console.notifications == ["notify: [notify] has no channel"])


def test_the_command_says_of_each_channel_what_came_back(home: Path, tmp_path: Path) -> None:
    table = '[notify]\ncommand = ["sh", "-c", "exit 3"]\nwebhooks = [{ url = "URL" }]\n'
    job = '[[node]]\n[job]\ncommand = ["true"]\n'
    (tmp_path / "flightdeck.toml").write_text(job)
    refused = flightdeck(home, "notify", "test", "--accept", cwd=tmp_path)
    assert (refused.code, "[notify] has no channel" in refused.err) == (2, True)
    with receiver() as server:
        (tmp_path / "flightdeck.toml").write_text(job + table.replace("URL", server.url))
        done = flightdeck(home, "notify", "test", "--accept", "--json", cwd=tmp_path)
        assert done.code == 1
        assert json.loads(done.out)["channels"] == [
            {"channel": "command", "sent": False, "answer": "sh ended with 3"},
            {"channel": "webhook 1", "sent": True, "answer": "127.0.0.1 answered 200"},
        ]
        shown = flightdeck(home, "notify", "test", cwd=tmp_path).out
        assert shown == "fail command: sh ended with 3\npass webhook 1: 127.0.0.1 answered 200\n"
        assert [json.loads(body)["title"] for body in server.bodies] == ["a test of flightdeck"] * 2
