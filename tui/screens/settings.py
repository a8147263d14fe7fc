"""The dialogs of what starts a run again: how (resumed, the same, or with changes), and the settings that people change
most, with what the plan says to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Input, Static

from engine import api
from engine.errors import ConfigError
from tui.formatting import resume_text, shortened
from tui.glyphs import MUTED
from tui.screens.dialog import Dialog, button
from tui.screens.use import DialogChoice
from tui.widgets.run_summary import own_program
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.api import Config, TrainingPlan
    from engine.snapshots import RunSnapshot

Asked = Callable[["Config"], Awaitable["TrainingPlan | str"]]
"""The plan of a configuration, or why there is none."""
_PAUSE_S: Final = 0.3
"""Before the plan is asked for: what is typed comes in letters."""
_ANSWERS: Final = ("memory", "batch", "throughput")
_LABEL: Final = 28
_FIELD: Final = 14


def starts(snapshot: RunSnapshot, taken: str | None) -> list[DialogChoice]:
    """The ways to start a run that has ended again. `taken`: another uses the nodes."""
    record = snapshot.record
    no_resume = {
        "succeeded": "it has succeeded: there is nothing left to train",
        "completed": record.cause,
    }.get(record.state)
    no_settings = "its command has its own settings: e opens the file" if own_program(snapshot) else None
    return [
        DialogChoice(
            "r", "resume", f"this run, {resume_text(snapshot)}: preflight, then its next attempt", no_resume or taken
        ),
        DialogChoice(
            "s", "the same", "a new run: same configuration, data and versions; asks where these have changed", taken
        ),
        DialogChoice("c", "changed", "a new run with other settings, which are asked for next", no_settings or taken),
    ]


class SettingsForm(Dialog):
    """Answers "go"; the settings that were changed are in `changes` then."""

    FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.focus_previous", show=False),
        Binding("down", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, config: Config, width: int, ask: Asked, effect: str) -> None:
        """`effect`: what becomes of the changes."""
        self._go = button("Launch", "go", "success")
        super().__init__(title, [], button("Cancel", "cancel"), self._go)
        self._config = config
        self._width = width
        self._ask = ask
        self._effect = effect
        self._texts = {key: _text(value) for key, value in api.edited_settings(config).items()}
        self.changes: dict[str, Any] = {}

    def compose_body(self) -> ComposeResult:
        for key, text in self._texts.items():
            with Horizontal(classes="setting"):
                yield Static(f"{key:<{_LABEL}}", markup=False)
                yield Input(text, name=key, compact=True)
                yield Static(classes="note", markup=False)
        yield from super().compose_body()

    def on_mount(self) -> None:
        self._answer()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._answer()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if not self._go.disabled:
            self._go.focus()

    def _answer(self) -> None:
        """Check what is in the fields, and ask for the plan of it."""
        fields = {field.name or "": field for field in self.query(Input)}
        self.changes = {
            key: api.parse_value(field.value)
            for key, field in fields.items()
            if field.value.strip() != self._texts[key]
        }
        faults: dict[str, str] = {}
        changed = self._config
        try:
            changed = api.with_settings(self._config, self.changes, "settings") if self.changes else self._config
        except ConfigError as error:
            faults = {fault.key.removeprefix("job."): fault.accepted for fault in error.faults}
        room = max(10, self._width - _LABEL - _FIELD - 2)
        for key, field in fields.items():
            fault = faults.get(key) or faults.get(key.partition(".")[0])
            note = f"was {self._texts[key]}" if key in self.changes else ""
            text = Content.styled(shortened(fault, room), "$error") if fault else Content.styled(note, MUTED)
            field.parent.query_one(".note", Static).update(text)  # type: ignore[union-attr]
        self._go.disabled = bool(faults)
        if faults:
            beside = {key for key in faults if {key, f"{key}.rank"} & fields.keys() and len(faults[key]) <= room}
            others = [f"{key}: {fault}" for key, fault in faults.items() if key not in beside]
            self.workers.cancel_node(self)
            self.set_body([pair("not possible", text, self._width, style="$error") for text in others])
        else:
            # No coroutine, which a newer one would cancel before it has begun.
            self.run_worker(partial(self._show_plan, changed), exclusive=True)  # type: ignore[arg-type]

    async def _show_plan(self, config: Config) -> None:
        # Read at once, its last answer would still be that of other settings.
        self.set_body([pair("plan", "is being made", self._width, style=MUTED), self._effect_line])
        await asyncio.sleep(_PAUSE_S)
        self.set_body([*plan_answer(await self._ask(config), self._width), self._effect_line])

    @property
    def _effect_line(self) -> Content:
        return pair("then", self._effect, self._width, style=MUTED)


def plan_answer(plan: TrainingPlan | str, width: int) -> list[Content]:
    """The plan's refusals, else its memory, batch and throughput."""
    if isinstance(plan, str):
        return [pair("plan", plan, width, style="$warning")]
    refused = [
        pair("refused", shortened(f"{refusal.name}: {refusal.text}", 3 * width), width, style="$error")
        for refusal in plan.refusals
    ]
    rows = dict(api.summary(plan))
    return refused or [pair(label, shortened(rows[label], 2 * width), width) for label in _ANSWERS if label in rows]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
