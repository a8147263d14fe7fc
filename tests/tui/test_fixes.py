"""Fixes that run on this machine, long commands folded, and checks that are skipped with a reason."""

from __future__ import annotations

import pytest

from engine.models import CheckResult, CheckStatus
from tests.tui import fake_engine
from tests.tui.conftest import SIZE, opened
from tests.tui.fake_engine import FakeEngine
from tui.screens.fix import ConfirmFix, FixDialog
from tui.widgets.text import FOLDED, folded

LINE = "test -r data && " + " && ".join(f"tar -cf - part{number} | ssh bea 'tar -xkf -'" for number in range(12))
EFFECT = "copies files and overwrites none: one that differs is renamed to *.aside-HASH; mv brings it back"
COPY = CheckResult(
    name="data_matches",
    status=CheckStatus.FAIL,
    summary="local-1 is missing 3 files that local-0 has",
    fix_command=LINE,
    fix_effect=EFFECT,
)


@pytest.mark.parametrize("size", SIZE)
async def test_a_copy_between_nodes_is_run_on_this_machine_after_a_confirmation(
    fake: FakeEngine, size: tuple[int, int]
) -> None:
    fake.check_results = [*fake_engine.CHECKS[:4], COPY]
    async with opened(fake, size=size) as console:
        await console.check()
        await console.shows("x runs it, after you confirm")
        await console.press("x")
        dialog = console.app.screen
        assert isinstance(dialog, ConfirmFix) and "run the fix on this machine?" in console.screen
        assert "more lines" in dialog.body and "part11" not in dialog.body
        assert "mv brings it back" in " ".join(dialog.body.split())
        await console.press("o")
        assert "part11" in dialog.body
        await console.press("right", "enter")
        await console.until(lambda: fake.commands == [("this machine", LINE)], "the fix")


async def test_an_environment_is_made_by_this_flightdeck_from_the_nodes_and_the_checks(fake: FakeEngine) -> None:
    command, effect = "flightdeck environments make --node local-1 --yes -c /flightdeck.toml", "makes an environment"
    failed = CheckResult(
        name="versions_match",
        status=CheckStatus.FAIL,
        summary="no such interpreter",
        fix_command=command,
        fixes={"local-1": command},
        effects={"local-1": effect},
        fix_effect=effect,
    )
    fake.check_results = [*fake_engine.CHECKS[:4], failed]
    async with opened(fake) as console:
        await console.check()
        await console.press("x")
        assert "run the fix on this machine?" in console.screen and effect in console.screen
        await console.press("right", "enter")
        await console.until(lambda: bool(fake.commands), "the fix")
        assert fake.commands[0][0] == "this machine"
        assert fake.commands[0][1].endswith("/flightdeck environments make --node local-1 --yes -c /flightdeck.toml")


async def test_a_fix_shows_each_nodes_end_as_it_comes_also_on_a_frozen_display(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixes = dict.fromkeys(("local-0", "local-1"), "kill 4711")
    fake.check_results = [*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS.model_copy(update={"fixes": fixes})]
    async with opened(fake) as console:
        await console.check()
        fake.held |= fixes.keys()
        await console.press("space", "x", "right", "enter")
        dialog = console.app.screen
        assert console.app.state.frozen and isinstance(dialog, FixDialog)
        await console.until(lambda: dialog.body.count("running") == 2, "the start")
        # On a display that is frozen nothing else is to be drawn.
        monkeypatch.setattr(console.app.store, "_changed", lambda: None)
        fake.held.remove("local-0")
        await console.until(lambda: dialog.body.count("running") == 1, "the end on local-0")


def test_a_command_is_folded_after_some_lines() -> None:
    assert folded("kill 4711", 78) == "kill 4711"
    assert folded("one\ntwo\nthree\nfour\nfive", 78).splitlines()[FOLDED:] == ["… and 2 more lines"]


@pytest.mark.parametrize("size", SIZE)
async def test_a_failed_check_is_skipped_with_a_reason_at_the_next_launch(
    fake: FakeEngine, size: tuple[int, int]
) -> None:
    fake.check_results = [*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS]
    async with opened(fake, size=size) as console:
        await console.check()
        await console.press("n")
        assert console.on_deck and "preflight has 1 failure" in console.notifications[-1]
        await console.press("s", "enter")
        assert not console.on_deck, "without a reason nothing is skipped"
        await console.press(*"mine", "enter")
        await console.shows("skipped at the next launch: mine")
        await console.press("n")
        await console.shows("ports: mine")
        await console.press("right", "enter")
        await console.until(lambda: fake.skipped == {"ports_free": "mine"}, "the launch")
        assert console.app.state.skips == {}, "it is for one launch"


async def test_a_skip_is_taken_back(fake: FakeEngine) -> None:
    fake.check_results = [*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS]
    async with opened(fake) as console:
        await console.check()
        await console.press("s", *"mine", "enter")
        await console.shows("skipped at the next launch")
        await console.press("s")
        assert console.app.state.skips == {} and console.app.state.failures() == 1
