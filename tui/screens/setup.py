"""The set-up of a flightdeck.toml: the nodes and their keys, their pythons, the model, the data, the method and its
size, and the file. What was chosen is kept at each step, so that it can be left and taken up again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from engine import api
from engine.errors import memory_text, plural
from tui.formatting import shortened
from tui.glyphs import FAIL, MUTED, OK, RUNNING, WARN, Glyphs
from tui.screens.client import Client
from tui.screens.fix import compare_command
from tui.state import ENGINE_ERRORS
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.api import Capacity, Config, DataInspection, EnvironmentPlan, NodeCandidate

_NAME: Final = 14
_ROWS_SHOWN: Final = 3
_METHODS: Final = {
    "lora": "small adapters beside frozen weights: quick, the least memory",
    "dora": "as lora, with a magnitude of its own: slower, often a little better",
    "full": "every weight: the most memory, the most that can be learned",
}


class SetupStep:
    """One question; one that is not needed is passed over."""

    name: ClassVar[str]
    title: ClassVar[str]
    keys: ClassVar[str]
    needed = True

    def __init__(self, setup: Setup) -> None:
        self.setup, self.client, self.engine = setup, setup.client, setup.engine
        self.rows: list[str] = []
        """Those that the cursor goes through."""
        self.cursor = 0

    def open(self) -> None:
        """Called when it is shown."""

    def draw(self, width: int) -> list[Content]:
        raise NotImplementedError

    def press(self, key: str) -> bool:
        """Do what the key means here; False where it means nothing."""
        if key not in ("up", "down") or not self.rows:
            return False
        self.cursor = max(0, min(len(self.rows) - 1, self.cursor + (1 if key == "down" else -1)))
        self.moved()
        return True

    def moved(self) -> None:
        """The cursor is on another row."""

    def take(self, text: str) -> bool:
        """Take what was typed; False goes on to the next step."""
        return False

    async def leave(self) -> str | None:
        """Why it cannot go on; None when it can. Raises ENGINE_ERRORS."""
        return None

    def mark(self, at: int) -> str:
        return ("> " if self.setup.glyphs.ascii else "▸ ") if at == self.cursor else "  "


class _Nodes(SetupStep):
    name, title = "nodes", "The machines that train, from ssh's configuration, Bonjour and this one."
    keys = "space takes, a all, K/J rank, t types one"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._touched, self._searching = setup.choices.chosen is not None, False
        self._shown: list[str] = []
        """Hosts on the screen: a key is accepted where its fingerprint can be seen."""

    def open(self) -> None:
        if not self.rows:
            self.setup.work(partial(self._search, self.setup.choices.typed), "search")

    async def _search(self, typed: Sequence[str], *, others: bool = True) -> None:
        """Each answer is shown as it comes."""
        setup, self._searching = self.setup, self._searching or others
        search = self.client.each(lambda: self.engine.setup.candidates(typed, others=others))
        try:
            async with aclosing(search) as candidates:
                async for candidate in candidates:
                    if not others:
                        # It may be one that was found, which tells more than its name.
                        seen = setup.candidates.get(candidate.host.ssh, candidate)
                        candidate = replace(candidate, host=seen.host)
                    setup.candidates[candidate.host.ssh] = candidate
                    self.rows = list(setup.candidates)
                    usual = tuple(host for host, one in setup.candidates.items() if one.usual)
                    setup.choose(**{} if self._touched else {"chosen": usual})
        finally:
            self._searching = self._searching and not others

    def _lacking(self, what: str) -> list[NodeCandidate]:
        return [node for node in self.setup.nodes if node.answer is not None and getattr(node.answer, what)]

    def press(self, key: str) -> bool:
        chosen, host = list(self.setup.choices.chosen or ()), self.rows[self.cursor] if self.rows else None
        if key == "a":
            everyone = [name for name, one in self.setup.candidates.items() if one.answer and one.answer.answers]
            wanted = [name for name in everyone if not self.setup.candidates[name].host.here] or everyone
            chosen = [] if set(wanted) == set(chosen) else wanted
        elif key == " " and host is not None:
            chosen = [name for name in chosen if name != host] if host in chosen else [*chosen, host]
            answer = self.setup.candidates[host].answer
            if host in chosen and answer is not None and not answer.answers:
                # It may have been asleep.
                self.setup.work(partial(self._search, [host], others=False), f"typed {host}")
        elif key in ("K", "J") and host in chosen:
            at = chosen.index(host)
            chosen.insert(max(0, at + (1 if key == "J" else -1)), chosen.pop(at))
        elif key in ("y", "c"):
            lacking = self._lacking("host_key" if key == "y" else "login")
            if shown := [one for one in lacking if one.host.ssh in self._shown]:
                self.setup.work(partial(self._let_in, shown), "keys")
            elif lacking:
                self.setup.say(f"scroll to {lacking[0].host.name} first: what is accepted must be on the screen")
            return True
        elif key == "t":
            self.setup.ask("[user@]host[:port]")
            return True
        else:
            return super().press(key)
        self._touched = True
        self.setup.say("")
        self.setup.choose(chosen=tuple(chosen))
        return True

    async def _let_in(self, nodes: Sequence[NodeCandidate]) -> None:
        """Accept their keys, or put ours there; then ask them anew, and go on once nothing is in the way."""
        self._touched = True
        for node in nodes:
            if node.answer is not None and node.answer.host_key is not None:
                await self.client.call(partial(self.engine.nodes.accept_host_key, node.answer.host_key))
            else:
                notice = f"putting a login key of this machine on {node.host.name}, which asks for your password"
                program = partial(self.engine.setup.copy_id_argv, node.host.ssh)
                self.setup.in_terminal("ssh-copy-id", node.host.name, notice, program)
        await self._search([node.host.ssh for node in nodes], others=False)
        if not self._lacking("host_key") and not self._lacking("login"):
            self.setup.action_next()

    def take(self, text: str) -> bool:
        # What is no host must not be kept, but can be corrected.
        with self.setup.refusals():
            api.hosts_from_names([text] if text else [])
            self.setup.ask_no_more()
            self.setup.say("")
            if text:
                self._touched, choices = True, self.setup.choices
                both = (choices.chosen or (), choices.typed)
                chosen, typed = (tuple(dict.fromkeys([*hosts, text])) for hosts in both)
                self.setup.choose(chosen=chosen, typed=typed)
                self.setup.work(partial(self._search, [text], others=False), f"typed {text}")
        return True

    async def leave(self) -> str | None:
        nodes, candidates = self.setup.nodes, self.setup.candidates
        absent = [host for host in self.setup.choices.chosen or () if host not in candidates] if self._searching else []
        waiting = ", ".join([*(node.host.name for node in nodes if node.answer is None), *absent])
        if not nodes or waiting:
            return f"no answer yet: {waiting}" if waiting else "take at least one: space, or t to type one"
        for what, why in (("host_key", "compare the host keys, then y accepts them"), ("login", "c runs ssh-copy-id")):
            if lacking := self._lacking(what):
                return f"{', '.join(node.host.name for node in lacking)}: {why}; or space leaves it out"
        return None

    def draw(self, width: int) -> list[Content]:
        rows, chosen, lines = list(self.setup.candidates.values()), list(self.setup.choices.chosen or ()), []
        room = max(3, self.setup.size.height - 16)
        first = max(0, min(self.cursor - room // 2, len(rows) - room))
        self._shown = self.rows[first : first + room]
        for at, (host, answer) in list(enumerate((row.host, row.answer) for row in rows))[first : first + room]:
            rank = str(chosen.index(host.ssh)) if host.ssh in chosen else ""
            glyph = RUNNING if answer is None else OK if answer.python else WARN if answer.answers else FAIL
            texts = ("asked",) if answer is None else (answer.machine, answer.about or answer.problem)
            if answer is not None and answer.host_key is not None:
                texts = (answer.host_key.fingerprint,)
            head = f"{self.mark(at)}[{rank:>2}] {shortened(host.name, _NAME):<{_NAME}} "
            text = shortened("; ".join(filter(None, texts)), width - len(head) - 2)
            mark = self.setup.glyphs.mark(glyph)
            lines.append(Content.assemble((head, "bold" if rank else ""), mark, " ", (text, MUTED)))
        lines.append(Content.styled("searching" if self._searching else "", MUTED))
        return lines + (_details(rows[self.cursor], width) if rows else [])


def _details(candidate: NodeCandidate, width: int) -> list[Content]:
    host, answer = candidate.host, candidate.answer
    rows = {host.name[:13]: ", ".join(filter(None, (host.ssh, host.about, " and ".join(host.sources))))}
    if answer is not None:
        key = f"typed on it, this prints the same: {compare_command(answer.host_key.key)}" if answer.host_key else ""
        rows |= {"python": answer.python or "", "problem": answer.problem, "what to do": key or answer.todo}
    return [pair(label, text, width) for label, text in rows.items() if text]


class _Pythons(SetupStep):
    name, keys = "python", "s leaves them as they are"
    title = "These have no python with mlx. Enter makes environments, which nothing else uses:"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._plans: list[EnvironmentPlan] = []
        self._texts: dict[str, str] = {}

    @property
    def needed(self) -> bool:  # type: ignore[override]
        return any(node.answer is not None and node.answer.lacks_mlx for node in self.setup.nodes)

    def open(self) -> None:
        self._plans, self._texts = [], {"": "asking the nodes what they have to make one with"}
        self.setup.work(self._plan, "python")

    async def _plan(self) -> None:
        config = await self.setup.config()
        lacking = {one.host.ssh for one in self.setup.nodes if one.answer is not None and one.answer.lacks_mlx}
        # One for all processes of a node.
        names = {node.ssh: node.name for node in config.nodes if node.ssh in lacking}
        self._plans = await self.client.call(lambda: self.engine.environments.plan(config, list(names.values())))
        self._texts = {plan.node: plan.describe() for plan in self._plans}

    def press(self, key: str) -> bool:
        if key == "s":
            self.setup.go(1)
        return key == "s"

    async def leave(self) -> str | None:
        if not self._plans or any(plan.problem for plan in self._plans):
            return "no environments can be made now; s leaves the nodes as they are"
        config, failed, lacking = await self.setup.config(), False, [plan for plan in self._plans if not plan.made]
        async with aclosing(self.client.each(lambda: self.engine.environments.make(config, lacking))) as steps:
            async for step in steps:
                self._texts[step.node], failed = step.text, failed or step.failed
                self.setup.draw()
        if not failed:
            for plan in self._plans:
                self.setup.candidates[plan.ssh] = self.setup.candidates[plan.ssh].with_python(plan.python)
        return "not all were made: enter tries again, s goes on with what is there" if failed else None

    def draw(self, width: int) -> list[Content]:
        return [pair(node[:13], text, width) for node, text in self._texts.items()]


class _Named(SetupStep):
    """Its answer is one of several, or is typed."""

    keys = "up/down or type"
    placeholder: ClassVar[str]

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.abouts: dict[str, str] = {}
        """Name → where it is, and how large."""

    def open(self) -> None:
        self.setup.ask(self.placeholder, getattr(self.setup.choices, self.name) or "")
        self._offer()
        self.setup.work(self._list, "copies")

    async def _list(self) -> None:
        """Add what the nodes have."""
        config = await self.setup.config()
        self.abouts |= await self.client.call(lambda: self.engine.setup.copies(config, dataset=self.name == "data"))
        self._offer()

    def _offer(self) -> None:
        self.rows, chosen = list(self.abouts), self.setup.typed
        self.cursor = self.rows.index(chosen) if chosen in self.rows else self.cursor
        if self.rows and not chosen:
            self.moved()

    def moved(self) -> None:
        self.setup.ask(self.placeholder, self.rows[self.cursor])

    async def leave(self) -> str | None:
        if not self.setup.typed:
            return f"choose one, or type it: {self.placeholder}"
        self.setup.choose(**{self.name: self.setup.typed})
        await self.setup.config()
        return None

    def draw(self, width: int) -> list[Content]:
        rows = enumerate(self.abouts.items())
        return [Content(shortened(f"{self.mark(at)}{name:<40}  {about}", width)) for at, (name, about) in rows]


class _Model(_Named):
    name, title = "model", "The model that is trained."
    placeholder = "a folder in mlx-lm's format on every node, such as ~/models/Qwen3-0.6B, or org/name"


class _Data(_Named):
    name, placeholder = "data", "a folder or file on every node, or hf:org/set SUBSET"
    title = "What it is trained on. Of a data set's subsets one is typed behind its name."

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._inspection: tuple[object, DataInspection | None] = None, None
        """As `_of` names it, and its data where that could be read."""
        self._refused = ""
        """The name that was refused once, as it cannot be trained on."""

    def open(self) -> None:
        self.abouts |= dict.fromkeys(self.engine.setup.data_found(self.setup.target), "beside the file")
        super().open()
        # What is only offered is being read.
        name, (of, inspection) = self.setup.choices.data, self._inspection
        if name and (inspection is None or of != self._of(name)):
            self.setup.work(partial(self._inspect, name), "inspect")

    def _of(self, name: str) -> tuple[object, ...]:
        """The data's name, and what else it is read by."""
        return name, self.setup.choices.model, self.setup.choices.chosen

    def moved(self) -> None:
        super().moved()
        self.setup.work(partial(self._inspect, self.rows[self.cursor]), "inspect")

    async def _inspect(self, name: str) -> None:
        self._inspection = None, None
        self.setup.choose(data=name)
        self.setup.say(f"reading {name}")
        try:
            config = await self.setup.config()
            read = await self.client.call(lambda: self.engine.setup.inspect(config, shown=_ROWS_SHOWN))
        except ENGINE_ERRORS:
            self._inspection = self._of(name), None
            raise
        # Another may have been chosen meanwhile.
        if self.setup.typed == name:
            self._inspection = self._of(name), read
            self.setup.say("")

    async def leave(self) -> str | None:
        why, name = await super().leave(), self.setup.typed
        if why is None and self._inspection[0] != self._of(name):
            # What is being read may be this.
            self.setup.workers.cancel_group(self.setup, "inspect")
            await self._inspect(name)
            if self._inspection[0] != self._of(name):
                return ""
            why = "these are its first rows: enter goes on with them"
        of, inspection = self._inspection
        if of == self._of(name) and inspection is not None and inspection.faults and self._refused != name:
            self._refused = name
            return "it cannot be trained on as it is: choose another, or enter goes on and it is corrected later"
        return why

    def draw(self, width: int) -> list[Content]:
        lines, inspection = super().draw(width), self._inspection[1]
        return lines if inspection is None else [*lines, Content(""), *_inspected(inspection, width)]


def _inspected(inspection: DataInspection, width: int) -> list[Content]:
    files = "; ".join(f"{name} {plural(file.examples, 'row')}, {file.form}" for name, file in inspection.files.items())
    how = inspection.conversion.describe() if inspection.conversion is not None else "mlx-lm's own files"
    lines = [pair("on", f"{inspection.node}, {inspection.source}", width), pair("read as", f"{how}: {files}", width)]
    for row in inspection.rows:
        counts = f": {row.tokens:,} tokens, {row.targets:,} trained on" if row.tokens else ""
        shown = Content.assemble((row.masked, MUTED), (row.trained, "bold" if row.masked else "")).wrap(width)[:5]
        lines += [Content.styled(f"line {row.line:,}{counts}", MUTED), *shown]
    lines = lines if inspection.files else lines[:1]
    return lines + [pair("but", text, width, style="$warning") for text in (*inspection.faults, *inspection.warnings)]


class _Method(SetupStep):
    name, title, keys = "method", "How it is trained, and what fits.", "up/down, left/right batch, -/+ length"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.rows = list(_METHODS)
        self._fits: dict[str, Capacity] = {}

    def open(self) -> None:
        # Another model, or other nodes, may have been chosen meanwhile.
        self._fits, choices = {}, self.setup.choices
        self.cursor = self.rows.index(choices.fine_tune_type or "lora")
        if choices.batch_tokens is None:
            self.setup.choose(batch_size=choices.batch_size or api.usual_batch(self.setup.ranks))
        self.moved()
        self.setup.work(self._fit, "fit")

    async def _fit(self) -> None:
        self.setup.say("what fits is being planned")
        config = await self.setup.config()
        self._fits = await self.client.call(lambda: self.engine.setup.capacities(config))
        self.setup.say("")
        self.moved()

    def moved(self, more: int = 0) -> None:
        """A batch in sequences is at most what fits; one in tokens is doubled or halved."""
        method, ranks, choices = self.rows[self.cursor], self.setup.ranks, self.setup.choices
        self.setup.choose(fine_tune_type=method)
        if choices.batch_tokens is not None:
            self.setup.choose(batch_tokens=max(1, int(choices.batch_tokens * 2.0**more)))
        else:
            batch = max(ranks, (choices.batch_size or api.usual_batch(ranks)) + more * ranks)
            most = (self._fits[method].amount if method in self._fits else 0) or batch
            self.setup.choose(batch_size=min(batch, most * ranks))

    def press(self, key: str) -> bool:
        if key in ("left", "right"):
            self.moved(1 if key == "right" else -1)
        elif key in ("-", "+") and (epochs := self.setup.choices.epochs) is not None:
            self.setup.choose(epochs=epochs + 1 if key == "+" else min(epochs, max(1, epochs - 1)))
        elif key in ("-", "+"):
            # By one of the first digit.
            iters = self.setup.choices.iters or api.USUAL_ITERS
            step = 10 ** max(0, len(str(iters - (key == "-"))) - 1)
            self.setup.choose(iters=max(1, iters + step * (1 if key == "+" else -1)))
        else:
            return super().press(key)
        return True

    async def leave(self) -> str | None:
        row = self._fits.get(self.rows[self.cursor])
        return f"not even one sequence fits on {', '.join(row.nodes)}" if row is not None and row.amount == 0 else None

    def draw(self, width: int) -> list[Content]:
        choices, ranks, lines = self.setup.choices, max(1, self.setup.ranks), list[Content]()
        for at, (method, about) in enumerate(_METHODS.items()):
            row, needed = self._fits.get(method), ""
            if row is not None and row.memory is not None:
                needed = f": {memory_text(row.memory.needed_bytes)} of {memory_text(row.memory.limit_bytes or 0)}"
            amount = f"up to {row.amount:,} a rank" if row is not None and row.amount else "does not fit"
            fits = (row.why_not or amount + needed) if row is not None else ""
            head = Content.assemble((f"{self.mark(at)}{method:<6}", "bold" if at == self.cursor else ""), fits)
            lines += [head, pair("", about, width, style=MUTED)]
        share, tokens = (choices.batch_size or 0) / ranks, choices.batch_tokens
        batch = f"{choices.batch_size} over all ranks, {share:g} on each" if tokens is None else f"{tokens:,} tokens"
        length = (
            plural(choices.iters or api.USUAL_ITERS, "iteration")
            if choices.epochs is None
            else f"{choices.epochs:g} epoch{'s' * (choices.epochs != 1)}"
        )
        return [*lines, Content(""), pair("batch", batch, width), pair("for", length, width)]


class _File(SetupStep):
    name, title, keys = "file", "Enter writes this; then everything is checked.", "up/down scroll"

    def open(self) -> None:
        self.setup.query_one("#setup-body").focus()

    async def leave(self) -> str | None:
        await asyncio.to_thread(self.engine.setup.write, self.setup.target, self.setup.text())
        return None

    def draw(self, width: int) -> list[Content]:
        try:
            lines = self.setup.text().splitlines()
        except ENGINE_ERRORS as error:
            return [pair("not possible", str(error), width, style="$error")]
        return [Content.styled(line, MUTED if line.startswith("#") else "") for line in lines]


_STEPS: Final = (_Nodes, _Pythons, _Model, _Data, _Method, _File)


class Setup(ModalScreen[Path]):
    """Answers the file once it is written."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "next", show=False),
        Binding("escape", "back", show=False),
    ]

    def __init__(self, client: Client, target: Path, glyphs: Glyphs, in_terminal: Callable[..., object]) -> None:
        """`in_terminal` runs a program there: what it is, where, a notice, and what makes its arguments."""
        super().__init__()
        self.client, self.target, self.glyphs, self.in_terminal = client, target, glyphs, in_terminal
        self.engine = client.engine
        self.choices = self.engine.setup.read(target)
        self.candidates: dict[str, NodeCandidate] = {}
        """By `[user@]host[:port]`, in the order in which they were found."""
        self._status = ""
        self._steps: list[SetupStep] = [make(self) for make in _STEPS]
        self._at = 0
        self._moving = False

    def compose(self) -> ComposeResult:
        with Vertical(id="setup") as box:
            box.border_title = f"set up {self.target.name}"
            yield Static(id="setup-path", markup=False)
            with VerticalScroll(id="setup-body"):
                yield Static(id="setup-text", markup=False)
            yield Static(id="setup-status", markup=False)
            yield Input(id="setup-input", compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).cursor_blink = False
        self.go(0)
        if self.choices.step:
            self.say("taken up where it was left: enter goes on")

    @property
    def step(self) -> SetupStep:
        return self._steps[self._at]

    @property
    def nodes(self) -> list[NodeCandidate]:
        """In rank order."""
        return [self.candidates[host] for host in self.choices.chosen or () if host in self.candidates]

    @property
    def ranks(self) -> int:
        return self.choices.ranks(node.host.ssh for node in self.nodes)

    def text(self) -> str:
        """That of the file. Raises ENGINE_ERRORS."""
        return self.engine.setup.text(self.target, self.choices, self.nodes)

    async def config(self) -> Config:
        """Read from the file's text. Raises ENGINE_ERRORS."""
        return await asyncio.to_thread(self.engine.setup.config, self.target, self.text())

    def work(self, work: Callable[[], Coroutine[Any, Any, None]], group: str) -> None:
        """Do it beside the keys, in place of what goes on in its group; a refusal is said."""

        async def run() -> None:
            with self.refusals():
                await work()

        # No coroutine, which a newer one would cancel before it has begun.
        self.run_worker(run, group=group, exclusive=True)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        try:
            yield
        except ENGINE_ERRORS as error:
            self.say(str(error))
        finally:
            self.draw()

    def choose(self, **changes: Any) -> None:
        self.choices = self.choices.model_copy(update=changes)
        self.draw()

    def ask(self, placeholder: str, value: str = "") -> None:
        """Have a person type something; the step gets it."""
        field = self.query_one(Input)
        field.placeholder, field.value, field.display = placeholder, value, True
        field.focus()
        # A letter takes the place of what is offered.
        field.select_all()

    def ask_no_more(self) -> None:
        self.query_one(Input).display = False
        self.set_focus(None)

    @property
    def typed(self) -> str:
        return self.query_one(Input).value.strip()

    def say(self, text: str) -> None:
        self._status = api.sanitise_text(text)
        self.draw()

    def draw(self) -> None:
        # Answers may come before it is there, or after it was left.
        if not self.query("#setup-status"):
            return
        names = [(f"{step.name}  ", "bold $primary" if step is self.step else MUTED) for step in self._steps]
        self.query_one("#setup-path", Static).update(Content.assemble(*names))
        # A column is the scroll bar's.
        lines = [Content(self.step.title), Content(""), *self.step.draw(max(40, self.app.size.width - 5))]
        self.query_one("#setup-text", Static).update(Content("\n").join(lines))
        self.query_one("#setup-status", Static).update(Content.styled(self._status, "$warning"))
        self.query_one("#setup").border_subtitle = f"{self.step.keys}, enter goes on, esc back"

    def on_resize(self) -> None:
        self.draw()

    def on_key(self, event: Key) -> None:
        # What a field takes as a letter does not come here.
        if self.step.press(event.character if event.is_printable and event.character else event.key):
            event.stop()
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if not self.step.take(self.typed):
            self.action_next()

    def action_next(self) -> None:
        """One step at a time, however many keys come."""
        if not self._moving:
            self._moving = True
            self.run_worker(self._next, group="step")  # type: ignore[arg-type]

    async def _next(self) -> None:
        try:
            with self.refusals():
                self.say("")
                if (why := await self.step.leave()) is not None:
                    self.say(why)
                elif self.step is self._steps[-1]:
                    self.dismiss(self.target)
                else:
                    self.go(1)
                    await self._keep()
        finally:
            self._moving = False

    def action_back(self) -> None:
        """From a field of the nodes, then from the step, then out."""
        if self._at:
            self.workers.cancel_group(self, "step")
            self._status = ""
            self.go(-1)
        elif self.query_one(Input).display:
            self.ask_no_more()
        else:
            self.app.run_worker(self._keep(), group="requests")
            self.dismiss(None)

    def go(self, steps: int) -> None:
        """To the next step that is needed, or back."""
        self._at += steps
        passed = ("model", "data", "method") if self.choices.own_program else ()
        while not self.step.needed or self.step.name in passed:
            self._at += steps
        self.ask_no_more()
        self.query_one("#setup-body").scroll_home(animate=False)
        self.step.open()
        self.draw()

    async def _keep(self) -> None:
        self.choices = self.choices.model_copy(update={"step": self._at})
        with self.refusals():
            await asyncio.to_thread(self.engine.setup.keep, self.target, self.choices)
