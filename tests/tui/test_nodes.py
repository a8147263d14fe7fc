"""The nodes in the console: shown as they answer, opened, fixed, with telemetry; only a person accepts a host key."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest
from rich.color import ColorSystem
from rich.console import Console as RichConsole
from textual.color import Color
from textual.theme import BUILTIN_THEMES
from textual.widgets import Button

from engine.cluster.transport.base import Completed
from engine.config.models import Config, Theme
from engine.errors import HostKeyChanged
from engine.models import GpuMemory, NodeFacts, NodeTelemetry, NvidiaGpu
from engine.snapshots import NodeCondition
from tests.terminal import Terminal
from tests.tui import fake_engine, macs
from tests.tui.conftest import DASHBOARD, SMALL, Console, opened
from tests.tui.fake_engine import FakeEngine
from tests.unit.cluster.cuda_nodes import cuda_node
from tui import node_state
from tui.app import _WAITS, FlightDeckApp
from tui.engine_client import TelemetryReceived
from tui.fixes import FixCommand
from tui.formatting import memory
from tui.glyphs import FEW_COLOURS, OK, STALE, warning_of_16
from tui.screens.dialog import Confirm, ConfirmLaunch
from tui.screens.fix import ChangedKey, FixDialog, UnknownKey
from tui.state import DeckState
from tui.widgets.node_detail import detail
from tui.widgets.pane import RowList
from tui.widgets.text import Text

WIDE = (200, 50)


@pytest.fixture
def studio(fake: FakeEngine) -> FakeEngine:
    """Four Macs, every pair of them cabled."""
    fake.found = macs.facts()
    return fake


def put(fake: FakeEngine, node: NodeFacts) -> None:
    """A probe finds the node like this from now on."""
    fake.found = [node if known.node == node.node else known for known in fake.found]


async def test_probing_fills_the_pane_as_the_nodes_answer(studio: FakeEngine) -> None:
    studio.held = {"mini"}
    app = FlightDeckApp(studio.engine, macs.configuration(), clock=lambda: fake_engine.NOW)
    async with app.run_test(size=DASHBOARD) as pilot:
        console = Console(app, pilot)
        await console.shows("probing 2/4")
        assert "▶ probing" in console.screen, "mini and what comes after it have not answered"
        assert app.state.topology is None
        studio.held.clear()
        await console.until(lambda: not app.state.probing and len(app.state.facts) == 4)
        await console.until(lambda: "probing" not in console.screen)
        assert app.state.topology is not None and app.state.topology.shape == "mesh"


async def test_what_was_seen_last_time_is_shown_at_once_as_old_as_it_is(studio: FakeEngine) -> None:
    studio.stored, studio.held = macs.facts(old_s=7200), set(macs.NAMES)
    app = FlightDeckApp(studio.engine, macs.configuration(), clock=lambda: fake_engine.NOW)
    async with app.run_test(size=DASHBOARD) as pilot:
        console = Console(app, pilot)
        await console.shows("2 h")
        assert console.screen.count("◌ stale") == 4
        studio.held.clear()
        await console.until(lambda: "◌ stale" not in console.screen)
        assert console.screen.count("✓ ok") == 4


@pytest.mark.parametrize("size", [SMALL, DASHBOARD, WIDE])
async def test_a_node_is_as_fresh_as_its_newest_sign_of_life(fake: FakeEngine, size: tuple[int, int]) -> None:
    snapshot = fake_engine.running()
    late = fake_engine.NOW + timedelta(seconds=900)
    fake.add(replace(snapshot, ranks=tuple(replace(rank, seen_at=late) for rank in snapshot.ranks)))
    async with opened(fake, follow=snapshot.record.id, size=size) as console:
        await console.press("1")
        console.app._clock = lambda: late
        await console.until(lambda: console.app.state.now == late)
        await console.shows("now")
        assert "stale" not in console.screen, "the ranks report, however old the probe is"
        head = console.app.deck.query_one("#nodes-head", Text)
        columns = head.content
        ended = fake_engine.succeeded()
        fake.put(replace(ended, record=ended.record.model_copy(update={"id": snapshot.record.id})))
        await console.until(lambda: console.screen.count("◌ stale  ") >= 2)
        await console.shows("15 min")
        assert head.content == columns, "no column has moved"


def test_telemetry_a_connection_and_a_probe_are_signs_of_life() -> None:
    run, old = fake_engine.running(), fake_engine.ago(900)
    linked = replace(run.ranks[0], seen_at=None, stepped_at=None, link=NodeCondition("connected", old))
    facts = {"local-0": fake_engine.facts(old_s=900)[0]}
    state = DeckState(now=fake_engine.NOW, ready=True, facts=facts, snapshot=run)
    quiet = replace(linked, link=None)
    values = {"local-0": NodeTelemetry(node="local-0", at=fake_engine.ago(3))}
    for changed, rank, seen in (
        (state, quiet, old),
        (state, linked, fake_engine.NOW),
        (replace(state, snapshot=replace(run, supervised=False)), linked, old),
        (replace(state, telemetry=values), quiet, fake_engine.ago(3)),
        (replace(state, facts={}), quiet, None),
    ):
        assert node_state.last_seen(changed, "local-0", rank) == seen
    assert node_state.condition(state, "local-0", quiet, {}) == (STALE, "stale")
    assert node_state.condition(replace(state, telemetry=values), "local-0", quiet, {}) == (OK, "ok")


async def test_telemetry_is_shown_while_it_is_fresh(studio: FakeEngine) -> None:
    studio.values = [*macs.telemetry()[:3], *macs.telemetry(old_s=60)[3:]]
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        await console.press("1")
        await console.shows("142 W")
        ultra, *_, air = (line for line in console.screen.splitlines() if "✓ ok       Apple M" in line)
        assert "97%" in ultra and "71 °C" in ultra and "256/512 GB" in ultra
        assert "W" not in air.split() and "18/48 GB" in air, "what the probe saw, not old telemetry"


async def test_telemetry_is_on_while_the_nodes_are_seen_or_a_run_goes_on_and_off_otherwise(
    studio: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.engine_client.LINGER_S", 0.0)
    async with opened(studio, size=SMALL, config=macs.configuration()) as console:
        await console.until(lambda: studio.listeners == 0, "no nodes on a small screen's first view")
        await console.press("1")
        await console.until(lambda: studio.listeners == 1, "telemetry in the nodes' view")
        await console.press("2")
        await console.until(lambda: studio.listeners == 0, "telemetry ended")
        studio.add(fake_engine.running())
        await console.until(lambda: studio.listeners == 1, "telemetry for the run")
    assert studio.listeners == 0 and studio.closed


async def test_a_frozen_display_holds_telemetry_and_shows_the_newest_when_it_thaws(studio: FakeEngine) -> None:
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        await console.press("1", "space")
        await console.shows("FROZEN")
        console.app.post_message(TelemetryReceived({value.node: value for value in macs.telemetry()}))
        await console.pilot.pause()
        assert "142 W" not in console.screen
        await console.press("space")
        await console.shows("142 W")


async def test_enter_opens_the_view_then_the_node_and_escape_goes_back(studio: FakeEngine) -> None:
    async with opened(studio, config=macs.configuration()) as console:
        await console.press(*["shift+tab"] * 4)
        assert console.app.state.pane == "nodes"
        await console.press("enter")
        assert console.app.state.view == "nodes" and not console.app.state.detail
        await console.press("j", "enter")
        await console.shows("1 nodes · max")
        for text in ("bea@max.local", "macOS 26.4.1 (25E253)", "Apple M4 Max", "12 of them performance cores"):
            assert text in console.screen
        await console.press("l")
        await console.shows("1 nodes · mini")
        await console.press("G")
        await console.until(lambda: "rank 0" in console.screen, "the wiring at the end")
        await console.press("escape")
        await console.until(lambda: "1 nodes · mini" not in console.screen)
        assert console.app.state.node == "mini" and console.app.state.view == "nodes"
        await console.press("escape")
        assert console.app.state.view == "dashboard"


async def test_the_detail_has_the_cables_the_wiring_and_who_is_at_the_other_end(studio: FakeEngine) -> None:
    studio.found = macs.facts(stranger=True)
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        await console.press("1", "enter")
        for text in (
            "mesh: every pair is cabled",
            "│ ultra ├──┬",
            "max en3, Up to 80 Gb/s",
            "guest, no node of this cluster",
            "ultra en8: guest",
            "rdma_en3",
            "the 4 Macs form a full mesh, all with RDMA on",
        ):
            await console.shows(text)


async def test_pairs_without_a_cable_are_named(studio: FakeEngine) -> None:
    studio.found = macs.facts(4, [(0, 1), (1, 2), (2, 3)])
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        await console.press("1")
        await console.shows("incomplete: 3 of 6 pairs have no cable")
        await console.shows("ultra–mini, ultra–air, max–air")


async def test_a_backend_that_is_not_possible_says_why(studio: FakeEngine) -> None:
    studio.found = macs.facts(4, [(0, 1)])
    async with opened(studio, size=WIDE, config=macs.configuration(backend="jaccl")) as console:
        await console.press("1")
        await console.shows("jaccl is not possible")


async def test_an_unknown_host_key_is_accepted_only_by_a_person_who_has_compared_it(studio: FakeEngine) -> None:
    well = studio.found[2]
    put(studio, macs.unknown_key(well))
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        await console.press("1", "j", "j")
        await console.shows("? key unknown")
        await console.press("x")
        dialog = console.app.screen
        assert isinstance(dialog, UnknownKey)
        assert macs.OFFER.fingerprint in dialog.body.replace("\n", "").replace(" ", "")
        assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in dialog.body
        assert console.app.focused is not None and console.app.focused.id == "cancel"
        await console.press("enter")
        assert console.on_deck and studio.accepted == []
        await console.press("x", "right")
        put(studio, well)
        await console.press("enter")
        await console.until(lambda: console.app.state.facts["mini"].problem is None, "the probe after it")
        assert studio.accepted == [macs.OFFER]
        await console.until(lambda: "? key unknown" not in console.screen)


async def test_a_key_that_has_become_another_meanwhile_is_not_accepted(studio: FakeEngine) -> None:
    put(studio, macs.unknown_key(studio.found[2]))
    studio.refusal = HostKeyChanged(
        "the host key is not the one that was accepted", expected="SHA256:a", shown="SHA256:b"
    )
    async with opened(studio, config=macs.configuration()) as console:
        await console.press("1", "j", "j", "x", "right", "enter")
        await console.until(lambda: bool(console.notifications))
        assert console.notifications == ["not accepted: the host key is not the one that was accepted"]
        assert studio.accepted == [] and console.app.state.facts["mini"].host_key is not None


async def test_a_changed_host_key_shows_both_and_can_only_be_removed_by_hand(studio: FakeEngine) -> None:
    put(studio, macs.changed_key(studio.found[2]))
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        await console.press("1", "j", "j")
        await console.shows("✗ key changed")
        await console.press("x")
        dialog = console.app.screen
        assert isinstance(dialog, ChangedKey)
        shown = dialog.body.replace("\n", " ")
        assert macs.CHANGE.accepted in shown and macs.CHANGE.found in shown
        assert "ssh-keygen -R '[mini.local]:2222' -f" in shown
        assert len(dialog.query(Button)) == 1
        await console.press("enter")
        assert console.on_deck and studio.accepted == []


async def test_an_unreachable_node_says_why_and_what_to_do_and_y_copies_that(studio: FakeEngine) -> None:
    put(studio, macs.unreachable(studio.found[3]))
    async with opened(studio, config=macs.configuration()) as console:
        await console.shows("✗ unreachable")
        await console.press("1", "G")
        await console.shows("no answer on port 22 within 10 s")
        await console.press("x")
        assert console.notifications[-1].endswith("no command fixes this: is it on, and on this network?")
        await console.press("y")
        await console.until(lambda: console.app.clipboard == "is it on, and on this network?")


async def test_the_row_of_the_cursor_is_underlined_where_there_are_few_colours(studio: FakeEngine) -> None:
    async with opened(studio, config=macs.configuration()) as console:
        rows = console.app.deck.pane("nodes").query_one(RowList)
        await console.press("1", "j")
        assert rows.get_component_styles("row-list--cursor").text_style.underline is not True
        console.app.add_class(FEW_COLOURS)
        await console.until(lambda: rows.get_component_styles("row-list--cursor").text_style.underline is True)


@pytest.mark.parametrize("theme", get_args(Theme))
def test_of_16_colours_a_warning_has_another_one_than_success_and_failure(theme: str) -> None:
    shown = BUILTIN_THEMES[theme].to_color_system().generate()
    colours = warning_of_16(shown), shown["success"], shown["error"]
    warning, *others = (Color.parse(colour).rich_color.downgrade(ColorSystem.STANDARD).number for colour in colours)
    assert warning not in others


async def test_a_terminal_of_16_colours_gets_the_warning_that_can_be_told_there(
    studio: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlightDeckApp, "is_headless", False)
    monkeypatch.setattr(RichConsole, "color_system", "standard")
    async with opened(studio, config=macs.configuration()) as console:
        shown = BUILTIN_THEMES[console.app.theme].to_color_system().generate()
        assert console.app.theme_variables["warning"] == warning_of_16(shown) != shown["warning"]


async def test_y_on_a_node_copies_the_fix_of_a_check_as_a_line_for_a_shell_here(studio: FakeEngine) -> None:
    config = macs.configuration()
    node = config.nodes[-1].name
    studio.check_results = [fake_engine.FAILED_PORTS.model_copy(update={"fixes": {node: "kill 4711"}})]
    async with opened(studio, config=config) as console:
        await console.check()
        await console.press("1", "G", "y")
        await console.until(lambda: console.app.clipboard.startswith("ssh "))
        assert console.app.clipboard.endswith(" 'kill 4711'")


async def test_a_clock_that_is_off_and_low_power_are_warned_of(studio: FakeEngine) -> None:
    put(studio, studio.found[1].model_copy(update={"clock_skew_s": -2.4, "low_power_mode": True}))
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        await console.press("1", "j")
        for text in ("▲ warn", "-2.4 s", "Low Power Mode is on", "its clock is -2.4 s off"):
            await console.shows(text)


async def test_a_fix_runs_after_a_confirmation_shows_its_end_and_offers_to_check_again(fake: FakeEngine) -> None:
    fake.check_results = [*fake_engine.CHECKS[:4], fake_engine.FAILED_PORTS]
    fake.held, fake.completed = {"later"}, Completed(1, b"killing\n\x1b[31m4711\x1b[0m\n", b"kill: not permitted\n")
    async with opened(fake) as console:
        await console.check()
        await console.shows("1 failure")
        fake.held = {"local-1"}
        await console.press("x")
        dialog = console.app.screen
        assert isinstance(dialog, Confirm) and "kill 4711" in dialog.body and "on local-1" in dialog.body
        assert "ends these processes for good" in dialog.body
        assert console.app.focused is not None and console.app.focused.id == "cancel"
        await console.press("enter")
        assert fake.commands == []
        await console.press("x", "right", "enter")
        running = console.app.screen
        assert isinstance(running, FixDialog) and "running" in running.body
        await console.until(lambda: fake.commands == [("local-1", "kill 4711")])
        fake.held = set()
        await console.until(lambda: "exit 1" in running.body, "the command's end")
        assert "killing" in running.body and "kill: not permitted" in running.body and "\x1b" not in running.body
        await console.until(lambda: bool(list((fake.home / "saved").glob("fix-*"))), "the output in a file")
        fake.check_results = list(fake_engine.CHECKS)
        assert console.app.focused is not None and console.app.focused.id == "again"
        await console.press("enter")
        await console.shows("passed")


async def test_a_fix_that_no_terminal_ran_says_so_and_shows_no_output(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "fix_argv", lambda *_: ["true"], raising=False)
    command = FixCommand("local-1", "sudo true", fake_engine.NOW)
    async with opened(fake) as console:
        assert console.app.state.config is not None
        console.app._run_in_terminal(console.app.state.config, command)
        assert (command.ended, command.outcome, command.output) == (True, "not run", ())


def test_an_interrupt_after_a_fix_has_ended_leaves_its_exit_code() -> None:
    with Terminal(["/bin/sh", "-c", _WAITS, "sh", "true"]) as terminal:
        terminal.read_until(b"enter returns to Flight Deck")
        terminal.signal(signal.SIGINT)
        # A shell that goes on reading.
        terminal.press(b"\n")
        assert terminal.wait() == 0


async def test_a_change_in_the_moment_in_which_a_dialog_opens_does_not_end_the_console(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        app = console.app
        app.push_screen(FixDialog([FixCommand("local-0", "true", fake_engine.NOW)], app.state, 78, "Check again"))
        app._show()
        await console.shows("running")


async def test_x_says_why_where_there_is_nothing_to_fix(fake: FakeEngine) -> None:
    async with opened(fake) as console:
        await console.press("1", "x")
        assert console.notifications[-1].endswith("no known problem on local-0 has a fix command")


async def test_a_shell_has_the_terminal_until_it_ends(
    fake: FakeEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = tmp_path / "seen"
    fake.shell = ["/bin/sh", "-c", f"echo shell > {seen}; exit 3"]
    handed: list[bool] = []

    @contextlib.contextmanager
    def suspend() -> Iterator[None]:
        handed.append(True)
        yield

    async with opened(fake) as console:
        console.app.suspend = suspend  # type: ignore[method-assign]
        await console.press("1", "s")
        await console.until(seen.exists)
        assert handed == [True] and seen.read_text() == "shell\n"
        assert console.notifications == ["the shell on local-0 ended with 3"]
        await console.press("escape")
        assert console.app.state.view == "dashboard"


async def test_x_gives_cables_a_network_after_a_confirmation_in_the_terminal(fake: FakeEngine) -> None:
    fake.setup_commands = {"local-0": ("sudo ifconfig bridge0 down",), "local-1": ("sudo ifconfig bridge0 down",)}

    async with opened(fake) as console:
        console.app.suspend = contextlib.nullcontext  # type: ignore[assignment]
        await console.press("1")
        await console.shows("Thunderbolt cables have no network")
        await console.press("x")
        dialog = console.app.screen
        assert isinstance(dialog, Confirm) and "sudo ifconfig bridge0 down" in dialog.body
        assert console.app.focused is not None and console.app.focused.id == "cancel"
        await console.press("enter")
        assert not (fake.home / "setup").exists()
        await console.press("x", "right", "enter")
        await console.until((fake.home / "setup").exists)
        assert (fake.home / "setup").read_text() == "local-0\nlocal-1\n"
        await console.until(lambda: console.app.state.topology is not None and not console.app.state.topology.setup)
        assert "cables have no network" not in console.screen


async def test_a_key_right_behind_a_movement_means_what_was_moved_to(studio: FakeEngine) -> None:
    async with opened(studio, config=macs.configuration()) as console:
        await console.press("1")
        console.app.deck.action_press("j")
        console.app.deck.action_press("s")
        await console.until(lambda: bool(console.notifications))
        assert studio.shells == ["max"]


async def test_where_the_terminal_cannot_be_handed_over_the_command_is_told(fake: FakeEngine) -> None:
    fake.shell = ["ssh", "-t", "ana@ultra.local"]
    async with opened(fake) as console:
        await console.press("1", "s")
        assert console.notifications == ["this terminal cannot be handed over; in another one: ssh -t ana@ultra.local"]


async def test_the_confirmation_of_a_launch_names_hosts_and_backend(studio: FakeEngine) -> None:
    async with opened(studio, config=macs.configuration()) as console:
        await console.until(lambda: console.app.state.network_plan is not None)
        await console.press("n")
        dialog = console.app.screen
        assert isinstance(dialog, ConfirmLaunch)
        assert "ana@ultra.local, bea@max.local, cyd@mini.local" in dialog.body and "4 ranks · jaccl" in dialog.body


async def test_a_run_says_which_node_is_away_since_when_and_that_its_rank_is_not_dead(fake: FakeEngine) -> None:
    quiet = fake_engine.running()
    link = NodeCondition("unreachable", fake_engine.ago(25), "no answer from its agent")
    ranks = (quiet.ranks[0], replace(quiet.ranks[1], link=link))
    fake.add(replace(quiet, ranks=ranks))
    async with opened(fake) as console:
        for text in (
            "✗ local-1 unreachable 25 s",
            "rank 1 on local-1: unreachable for 25 s (no",
            "a rank goes on training while its node is",
            "unreachable; its lease ends it",
            "✗ unreachable",
        ):
            await console.shows(text)
        console.app.store.change(config=short_lease(console.app.state.config))
        await console.shows("a lease of 8 s has run out")
        await console.shows("keeper has ended the rank, or is letting it")
        assert "restart" not in console.screen


def short_lease(config: Config | None) -> Config:
    assert config is not None
    return config.model_copy(update={"recovery": config.recovery.model_copy(update={"lease_s": 8.0})})


async def test_after_looking_around_the_demo_is_a_key_away(fake: FakeEngine) -> None:
    async with opened(fake, config=None) as console:
        await console.until(lambda: not console.on_deck)
        await console.press("escape")
        await console.shows("d demo")
        await console.press("d")
        await console.shows("running 0:46")
        assert len(fake.launched) == 1


async def test_the_narrow_strip_has_a_tab_for_the_logs(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, size=SMALL) as console:
        await console.shows(" logs ")
        await console.press("tab")
        assert console.app.state.pane == "logs"


@pytest.mark.slow
async def test_sixty_four_nodes_are_listed_and_walked(fake: FakeEngine) -> None:
    fake.found, fake.values = macs.facts(64, macs.ring(64)), macs.telemetry(64)
    async with opened(fake, size=WIDE, config=macs.configuration(64)) as console:
        await console.press("1")
        await console.shows("142 W")
        await console.press("G")
        await console.shows("node63")
        assert console.app.state.node == "node63"
        await console.press("enter")
        await console.shows("1 nodes · node63")
        await console.shows("ring: the cables make a circle through all nodes")
        for size in ((160, 40), DASHBOARD, SMALL, (60, 20)):
            await console.pilot.resize_terminal(*size)
            await console.pilot.pause()
            assert "node63" in console.screen


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160, 200])
async def test_the_table_fits_any_width_and_keeps_what_matters_longest(studio: FakeEngine, width: int) -> None:
    studio.values = macs.telemetry()
    async with opened(studio, size=(width, 32), config=macs.configuration()) as console:
        await console.press("1")
        await console.shows("✓ ok")
        await console.until(lambda: len(console.app.state.telemetry) == 4, "telemetry")
        row = next(line for line in console.screen.splitlines() if "ultra" in line and "✓ ok" in line)
        assert row.rstrip().endswith("│") and len(row) == width
        assert ("97%" in row) == (width >= 80) or width == 60


async def test_nvidia_gpus_are_shown_where_there_are_some(studio: FakeEngine) -> None:
    h100 = NvidiaGpu(name="NVIDIA H100", memory_bytes=80 * 2**30)
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        state = console.app.state
        facts = state.facts["mini"].model_copy(update={"gpus": (h100, h100), "nvidia_driver": "550.54", "cuda": "12.4"})
        used = (GpuMemory(index=0, used_bytes=40 * 2**30, total_bytes=80 * 2**30), GpuMemory(index=1))
        values = NodeTelemetry(node="mini", at=state.now, gpu_memory=used)
        boxed = replace(state, facts={**state.facts, "mini": facts}, telemetry={"mini": values})
        text = detail(boxed, "mini", 100).plain
        assert "2 x NVIDIA H100" in text and "550.54, CUDA 12.4" in text and "0: 40/80 GB\n" in text
        assert "NVIDIA" not in detail(state, "mini", 100).plain
        on_cuda = cuda_node("mini").model_copy(update={"probed_at": state.now})
        text = detail(replace(state, facts={**state.facts, "mini": on_cuda}), "mini", 100).plain
        for shown in ("2 x NVIDIA H100 80GB HBM3 (compute capability 9.0)", "0.32.4, mlx-cuda-13 0.32.4", "gpu (CUDA)"):
            assert shown in text


async def test_a_new_age_does_not_repaint_a_pane(studio: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(studio, config=macs.configuration()) as console:
        pane = console.app.deck.pane("nodes")
        before, painted = console.screen, list[bool]()
        monkeypatch.setattr(pane, "refresh", lambda *_, **__: painted.append(True))
        later = fake_engine.NOW + timedelta(seconds=7)
        console.app._clock = lambda: later
        console.app.store.change(now=later)
        await console.until(lambda: console.screen != before, "the new age")
        assert not painted, "its rows are, and not its border with all that is in it"


async def test_a_node_that_falls_silent_is_not_shown_as_its_last_probe_found_it(studio: FakeEngine) -> None:
    async with opened(studio, size=WIDE, config=macs.configuration()) as console:
        await console.press("1")
        await console.until(lambda: console.app.state.listening)
        times = [fake_engine.NOW + timedelta(seconds=60)]
        console.app._clock = lambda: times[-1]
        values = {value.node: value.model_copy(update={"at": times[-1]}) for value in macs.telemetry()}
        values["mini"] = NodeTelemetry(node="mini", at=times[-1], problem="10.77.0.3 does not answer: timed out")
        console.app.post_message(TelemetryReceived(values))
        await console.shows("◌ silent")
        assert console.screen.count("◌ silent") == 1
        times.append(times[-1] + timedelta(seconds=40))
        await console.until(lambda: console.screen.count("◌ silent") >= 4, "nobody has said a word for too long")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (549_755_813_888, "512 GB"),
        (137_438_953_472, "128 GB"),
        (8 * 2**30, "8 GB"),
        (2**34 // 3, "5.3 GB"),
        (2**29, "512 MB"),
    ],
)
def test_a_macs_memory_is_shown_as_it_is_sold(count: int, text: str) -> None:
    """`hw.memsize` of an M3 Ultra, an M4 Max and an M1 Air."""
    assert memory(count) == node_state.of_total(None, count) == text
    assert node_state.of_total(count // 2, count) == f"{memory(count // 2).split()[0]}/{text}"
