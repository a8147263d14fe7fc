"""The chat: who answers, what is kept on the screen, the server that it starts and stops, and what it cannot do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import pytest
from textual.widgets import Input

from engine.api import ChatAnswer, ChatExchange
from engine.errors import InputError, LaunchError
from engine.models import RunState
from engine.snapshots import RunSnapshot, TrainedFile
from tests.tui import fake_engine
from tests.tui.conftest import DASHBOARD, SIZE, SMALL, Console, opened
from tests.tui.fake_engine import FakeEngine

TRAINED: Final = TrainedFile("/home/ana/adapters.safetensors", 7, "local-0", "mlx_lm generate")
RUN: Final = fake_engine.succeeded().record.id


@asynccontextmanager
async def chatting(fake: FakeEngine, *, size: tuple[int, int] = DASHBOARD) -> AsyncIterator[Console]:
    """The chat with a run that has ended, opened by its key."""
    fake.add(replace(fake_engine.succeeded(), trained=TRAINED))
    async with opened(fake, size=size, follow=RUN) as console:
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        await console.press("c")
        await console.shows("tower to heron")
        yield console


@pytest.mark.parametrize("size", SIZE)
async def test_two_keys_lead_from_the_end_of_a_run_to_an_answer(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.serving.set()
    async with chatting(fake, size=size) as console:
        assert "nothing was asked yet: enter asks" in console.screen
        await console.press("enter")
        await console.shows("trained  an answer of trained")
        assert fake.asked == [("trained", ["tower to heron"])]
        assert "enter ask" in console.screen


async def test_up_and_down_lead_through_the_prompts_of_the_run_and_back_to_what_was_typed(fake: FakeEngine) -> None:
    async with chatting(fake) as console:
        for key, shown in (("down", "hold level"), ("down", "climb"), ("down", "tower"), ("up", "climb")):
            await console.press(key)
            await console.shows(f"{shown}")
        await console.press(*"!?", "up")
        await console.shows("climb and maintain ")
        await console.press("down")
        await console.shows("climb and maintain!?")


async def test_a_question_that_comes_before_the_model_is_ready_waits_for_it(fake: FakeEngine) -> None:
    async with chatting(fake) as console:
        await console.press("enter")
        await console.shows("you  tower to heron")
        assert "starting the model" in console.screen and fake.asked == []
        fake.serving.set()
        await console.shows("an answer of trained")


async def test_tab_lets_the_base_model_answer_in_a_conversation_of_its_own(fake: FakeEngine) -> None:
    fake.serving.set()
    async with chatting(fake) as console:
        await console.press("enter")
        await console.shows("an answer of trained")
        await console.press("tab", *"more", "enter")
        await console.shows("base  an answer of base")
        await console.press("tab", *"why", "enter")
        await console.until(lambda: len(fake.asked) == 3, "the third question")
    assert fake.asked[1] == ("base", ["more"])
    assert fake.asked[2][1] == ["tower to heron", "an answer of trained\x1b[2J", "why"]


async def test_a_new_conversation_forgets_what_was_said(fake: FakeEngine) -> None:
    fake.serving.set()
    async with chatting(fake) as console:
        await console.press("enter")
        await console.shows("an answer of trained")
        await console.press("ctrl+n", *"again", "enter")
        await console.until(lambda: len(fake.asked) == 2, "the second question")
    assert fake.asked[1] == ("trained", ["again"])


async def test_an_answer_goes_on_where_it_began_after_a_new_conversation(fake: FakeEngine) -> None:
    fake.serving.set()
    fake.pieces = ("half", *[" more"] * 3)
    async with chatting(fake) as console:
        await console.shows("nothing was asked yet")
        fake.serving.clear()
        await console.press("enter", "ctrl+n")
        await console.shows("a new conversation")
        fake.serving.set()
        await console.shows("trained  half more more more")
        assert "a new conversation" in console.screen


async def test_what_is_thought_gives_way_to_the_answer_and_one_that_is_cut_says_so(fake: FakeEngine) -> None:
    fake.serving.set()
    fake.pieces = (ChatAnswer(thought="\nLet me see"), ChatAnswer(cut=True))
    async with chatting(fake) as console:
        await console.press("enter")
        await console.shows("trained  Let me see  (it has only thought, cut at 512 tokens)")
        fake.pieces = (ChatAnswer(thought="Let me think"), "It is ", ChatAnswer("calm", cut=True))
        await console.press(*"more", "enter")
        await console.shows("trained  It is calm  (cut at 512 tokens)")
        assert "Let me think" not in console.screen and fake.asked[1][1] == ["more"]


async def test_earlier_exchanges_are_shown(fake: FakeEngine) -> None:
    fake.kept = [ChatExchange(at=fake_engine.NOW, model="base", prompt="before", answer="it was said")]
    async with chatting(fake) as console:
        await console.shows("base  it was said")


@pytest.mark.parametrize(("there", "stopped"), [(False, [(f"{RUN}-serve", False)]), (True, [])])
async def test_only_a_server_of_its_own_is_stopped(
    fake: FakeEngine, there: bool, stopped: list[tuple[str, bool]]
) -> None:
    fake.served_already = there
    fake.serving.set()
    async with chatting(fake) as console:
        await console.press("enter")
        await console.shows("an answer of trained")
        await console.press("escape")
        await console.until(lambda: console.on_deck and fake.aborted == stopped, "the stop")


async def test_a_server_that_cannot_start_is_one_clear_line_and_the_next_question_tries_again(fake: FakeEngine) -> None:
    fake.refusal = LaunchError("no model can be loaded", why="its folder /home/ana/models/base is gone")
    fake.serving.set()
    async with chatting(fake, size=SMALL) as console:
        await console.shows("error  no model can be loaded: its folder /home/ana/models/base is gone")
        assert fake.asked == [] and not console.on_deck
        fake.refusal = None
        await console.press("enter")
        await console.shows("trained  an answer of trained")
        assert "enter asks again" not in console.screen


async def test_a_server_that_dies_while_it_answers_is_one_line_behind_what_had_come(fake: FakeEngine) -> None:
    fake.pieces = ("half an", " answer", InputError("it does not answer", why="the connection was lost"))
    fake.serving.set()
    async with chatting(fake) as console:
        await console.press("enter")
        await console.shows("error  it does not answer: the connection was lost")
        assert "trained  half an answer" in console.screen
        fake.pieces = ("here again, ",)
        await console.press(*"more", "enter")
        await console.shows("trained  here again, trained")


async def test_who_has_scrolled_up_stays_there_until_the_end_is_seen_again(fake: FakeEngine) -> None:
    fake.kept = [ChatExchange(at=fake_engine.NOW, model="base", prompt=f"question {n}", answer="-") for n in range(50)]
    fake.serving.set()
    async with chatting(fake, size=SMALL) as console:
        log = console.app.screen.query_one("#chat-log")
        await console.press("enter")
        await console.shows("an answer of trained")
        await console.until(lambda: log.scroll_y == log.max_scroll_y > 0, "the end")
        fake.serving.clear()
        fake.pieces = ("line\n" * 30,)
        await console.press("tab", *"more", "enter", "pageup")
        place = log.scroll_y
        assert place < log.max_scroll_y
        before = log.max_scroll_y
        fake.serving.set()
        await console.until(lambda: log.max_scroll_y > before, "the answer")
        assert log.scroll_y == place
        await console.press(*["pagedown"] * 9)
        await console.until(lambda: log.scroll_y == log.max_scroll_y, "the end")


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (fake_engine.running(), "the run has not ended"),
        (fake_engine.succeeded(), "the run has saved no weights"),
    ],
    ids=["running", "nothing saved"],
)
async def test_what_cannot_answer_says_why(fake: FakeEngine, shown: RunSnapshot, why: str) -> None:
    fake.add(shown)
    async with opened(fake, follow=shown.record.id) as console:
        await console.until(lambda: console.app.state.snapshot is not None, "the run")
        await console.press("c")
        assert any(why in text for text in console.notifications)


async def test_its_own_server_takes_nothings_place_and_another_run_that_starts_is_said(fake: FakeEngine) -> None:
    night = fake_engine.failed()
    fake.add(replace(night, trained=TRAINED))
    # The engine of the tests stops another run than that of the chat's server.
    fake.served_already = True
    server = fake_engine.record(f"{night.record.id}-serve", task="serve", source=night.record.id, iteration=None)
    async with opened(fake) as console:
        await console.shows("first cause")
        await console.press("c", "escape")
        fake.add(replace(fake_engine.running(), record=server))
        await console.until(lambda: len(console.app.state.runs or ()) == 2, "the server's run")
        await console.shows("first cause")
        assert console.notifications == []
        await console.press("c")
        fake.put(replace(fake_engine.aborted(), record=server.model_copy(update={"state": RunState.ABORTED})))
        fake.add(fake_engine.running())
        await console.until(lambda: "has started: 5 lists it" in " ".join(console.notifications), "the notice")
        assert not console.on_deck


async def test_letters_are_text_in_the_chat(fake: FakeEngine) -> None:
    async with chatting(fake) as console:
        console.app.screen.query_one(Input).clear()
        await console.press("q", "n", "5")
        assert console.app.screen.query_one(Input).value == "qn5"
