"""The steps of a set-up: the nodes and their keys, the model, the data, the method and its size, and the file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from textual.content import Content

from engine import api
from engine.errors import memory_text
from tui.formatting import shortened
from tui.glyphs import FAIL, MUTED, OK, RUNNING, WARN
from tui.screens.fix import compare_command
from tui.screens.setup import Setup, SetupStep
from tui.state import ENGINE_ERRORS
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.api import Capacity, DataInspection, NodeCandidate

_NAME: Final = 14
_ROWS_SHOWN: Final = 3
_METHODS: Final = {
    "lora": "small adapters beside frozen weights: quick, the least memory",
    "dora": "as lora, with a magnitude of its own: slower, often a little better",
    "full": "every weight: the most memory, the most that can be learned",
}


class Nodes(SetupStep):
    name, title = "nodes", "The machines that train, from ssh's configuration, Bonjour and this one."
    keys = "space takes, a all, K/J rank, t types one"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._touched = setup.choices.chosen is not None
        self._searching = self._asked = False

    def open(self) -> None:
        if not self.setup.candidates:
            self.setup.run_worker(self._search(self.setup.choices.typed), group="search")

    async def _search(self, typed: Sequence[str], *, others: bool = True) -> None:
        """Each answer is shown as it comes."""
        setup, engine, self._searching = self.setup, self.setup.client.engine, True
        try:
            async with aclosing(setup.client.each(lambda: engine.setup.candidates(typed, others=others))) as candidates:
                async for candidate in candidates:
                    setup.candidates[candidate.host.ssh] = candidate
                    usual = tuple(host for host, one in setup.candidates.items() if one.usual)
                    setup.choose(**{} if self._touched else {"chosen": usual})
        except ENGINE_ERRORS as error:
            setup.say(str(error))
        self._searching = False
        setup.draw()

    @property
    def rows(self) -> Sequence[str]:
        return list(self.setup.candidates)

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
        elif key in ("K", "J") and host in chosen:
            at = chosen.index(host)
            chosen.insert(max(0, at + (1 if key == "J" else -1)), chosen.pop(at))
        elif key in ("y", "c") and (lacking := self._lacking("host_key" if key == "y" else "login")):
            self.setup.run_worker(self._let_in(lacking), group="keys", exclusive=True)
            return True
        elif key == "t":
            self._asked = True
            self.setup.ask("[user@]host[:port]")
            return True
        else:
            return super().press(key)
        self._touched = True
        self.setup.choose(chosen=tuple(chosen))
        return True

    async def _let_in(self, nodes: Sequence[NodeCandidate]) -> None:
        """Accept their keys, or put ours there; then ask them anew, and go on once nothing is in the way."""
        client, setup = self.setup.client, self.setup
        try:
            for node in nodes:
                if node.answer is not None and node.answer.host_key is not None:
                    await client.call(partial(client.engine.nodes.accept_host_key, node.answer.host_key))
                else:
                    notice = f"putting a login key of this machine on {node.host.name}, which asks for your password"
                    program = partial(client.engine.setup.copy_id_argv, node.host.ssh)
                    setup.in_terminal("ssh-copy-id", node.host.name, notice, program)
        except ENGINE_ERRORS as error:
            setup.say(str(error))
            return
        self._touched = True
        await self._search([node.host.ssh for node in nodes], others=False)
        if not self._lacking("host_key") and not self._lacking("login"):
            setup.action_next()

    def take(self, text: str) -> bool:
        self.close()
        if text:
            self._touched, choices = True, self.setup.choices
            both = (tuple(dict.fromkeys([*before, text])) for before in (choices.typed, choices.chosen or ()))
            self.setup.choose(**dict(zip(("typed", "chosen"), both, strict=True)))
            self.setup.run_worker(self._search([text], others=False), group="typed")
        return True

    def close(self) -> bool:
        asked, self._asked = self._asked, False
        if asked:
            self.setup.ask_no_more()
        return asked

    async def leave(self) -> str | None:
        nodes = self.setup.nodes
        waiting = ", ".join(node.host.name for node in nodes if node.answer is None)
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
    lines = [pair(host.name[:13], ", ".join(filter(None, (host.ssh, host.about, " and ".join(host.sources)))), width)]
    if answer is None or answer.python is not None:
        return lines + [pair("python", answer.python, width) for answer in [answer] if answer and answer.python]
    key = answer.host_key
    todo = answer.todo if key is None else f"typed on it, this prints the same: {compare_command(key.key)}"
    return [*lines, pair("problem", answer.problem, width, style="$warning"), pair("what to do", todo, width)]


class Named(SetupStep):
    """Its answer is one of several, or is typed."""

    keys = "up/down or type"
    placeholder: ClassVar[str]

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.names: list[str] = []

    @property
    def rows(self) -> Sequence[str]:
        return self.names

    def open(self) -> None:
        self.setup.ask(self.placeholder, getattr(self.setup.choices, self.name) or next(iter(self.names), ""))

    def moved(self) -> None:
        self.setup.ask(self.placeholder, self.names[self.cursor])

    async def leave(self) -> str | None:
        if not self.setup.typed and not self.setup.has_yaml:
            return f"choose one, or type it: {self.placeholder}"
        self.setup.choose(**{self.name: self.setup.typed or None})
        await self.setup.config()
        return None

    def draw(self, width: int) -> list[Content]:
        return [Content(shortened(f"{self.mark(at)}{name}", width)) for at, name in enumerate(self.names)]


class Model(Named):
    name, title = "model", "The model that is trained."
    placeholder = "a folder in mlx-lm's format on every node, such as ~/models/Qwen3-0.6B"


class Data(Named):
    name, title, placeholder = "data", "What it is trained on.", "a folder or a file"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._inspection: tuple[str, DataInspection | str] | None = None
        """The name, and its data or why that is not known."""

    def open(self) -> None:
        remote = any(not node.host.here for node in self.setup.nodes)
        self.names = self.setup.client.engine.setup.data_found(self.setup.target, remote=remote)
        super().open()

    def changed(self, text: str) -> None:
        if text in self.names:
            self.setup.run_worker(self._inspect(text), group="inspect", exclusive=True)

    async def _inspect(self, name: str) -> None:
        engine, self._inspection = self.setup.client.engine, None
        self.setup.choose(data=name)
        self.setup.say(f"reading {name}")
        try:
            config = await self.setup.config()
            read = await self.setup.client.call(lambda: engine.setup.inspect(config, shown=_ROWS_SHOWN))
            self._inspection = name, read
        except ENGINE_ERRORS as error:
            self._inspection = name, str(error)
        self.setup.say("")

    async def leave(self) -> str | None:
        name = self.setup.typed
        if (why := await super().leave()) is not None or not name:
            return why
        if self._inspection is None or self._inspection[0] != name:
            await self._inspect(name)
            return "these are its first rows: enter goes on with them"
        return None

    def draw(self, width: int) -> list[Content]:
        lines = super().draw(width)
        return lines if self._inspection is None else [*lines, Content(""), *_inspected(self._inspection[1], width)]


def _inspected(inspection: DataInspection | str, width: int) -> list[Content]:
    if isinstance(inspection, str):
        return [pair("not read", inspection, width, style="$warning")]
    files = "; ".join(f"{name} {file.examples:,} rows, {file.form}" for name, file in inspection.files.items())
    how = inspection.conversion.describe() if inspection.conversion is not None else "mlx-lm's own files"
    lines = [pair("on", f"{inspection.node}, {inspection.source}", width), pair("read as", f"{how}: {files}", width)]
    for row in inspection.rows:
        counts = f": {row.tokens:,} tokens, {row.targets:,} trained on" if row.tokens else ""
        shown = Content.assemble((row.masked, MUTED), (row.trained, "bold" if row.masked else "")).wrap(width)[:5]
        lines += [Content.styled(f"line {row.line:,}{counts}", MUTED), *shown]
    notes = [*((text, "$warning") for text in inspection.warnings), *((text, "$error") for text in inspection.faults)]
    return lines + [pair("but", text, width, style=style) for text, style in notes]


class Method(SetupStep):
    name, title, keys = "method", "How it is trained, and what fits.", "up/down, left/right batch"
    rows = tuple(_METHODS)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._fits: dict[str, Capacity] = {}
        self._problem = ""

    def open(self) -> None:
        choices = self.setup.choices
        self.cursor = self.rows.index(choices.fine_tune_type or "lora")
        size = choices.batch_size or api.usual_batch(len(self.setup.nodes))
        self.setup.choose(batch_size=size, iters=choices.iters or 1000)
        self.moved()
        self.setup.run_worker(self._fit(), group="fit", exclusive=True)

    async def _fit(self) -> None:
        engine, self._problem = self.setup.client.engine, "what fits is being planned"
        try:
            config = await self.setup.config()
            self._fits = await self.setup.client.call(lambda: engine.setup.capacities(config))
            self._problem = ""
        except ENGINE_ERRORS as error:
            self._problem = f"what fits is not known: {error}"
        self.moved()

    def moved(self) -> None:
        """The batch is at most what fits."""
        method, size = self.rows[self.cursor], self.setup.choices.batch_size or 1
        most = (self._fits[method].amount if method in self._fits else 0) or size
        self.setup.choose(fine_tune_type=method, batch_size=min(size, most * len(self.setup.nodes)))

    def press(self, key: str) -> bool:
        if key in ("left", "right"):
            ranks, size = len(self.setup.nodes), self.setup.choices.batch_size or 1
            self.setup.choose(batch_size=max(ranks, size + (ranks if key == "right" else -ranks)))
            self.moved()
            return True
        return super().press(key)

    async def leave(self) -> str | None:
        row = self._fits.get(self.rows[self.cursor])
        refused = row is not None and row.amount == 0
        return f"not even one sequence fits on {', '.join(row.nodes)}" if row is not None and refused else None

    def draw(self, width: int) -> list[Content]:
        ranks, size, lines = len(self.setup.nodes), self.setup.choices.batch_size or 0, []
        for at, (method, about) in enumerate(_METHODS.items()):
            row, needed = self._fits.get(method), ""
            if row is not None and row.memory is not None:
                needed = f": {memory_text(row.memory.needed_bytes)} of {memory_text(row.memory.limit_bytes or 0)}"
            amount = f"up to {row.amount:,} a rank" if row is not None and row.amount else "does not fit"
            fits = (row.why_not or amount + needed) if row is not None else ""
            style = "bold" if at == self.cursor else ""
            lines += [
                Content.assemble((f"{self.mark(at)}{method:<6}", style), fits),
                pair("", about, width, style=MUTED),
            ]
        size_text = f"{size} sequences over all ranks, {size / max(1, ranks):g} on each"
        lines += [Content(""), pair("batch", size_text, width)]
        return lines + [pair("", self._problem, width, style=MUTED)] * bool(self._problem)


class File(SetupStep):
    name, title, keys = "file", "Enter writes this; then everything is checked.", "up/down scroll"

    def press(self, key: str) -> bool:
        step = {"up": -1, "down": 1, "pageup": -10, "pagedown": 10}.get(key)
        if step is not None:
            self.setup.query_one("#setup-body").scroll_relative(y=step, animate=False)
        return step is not None

    async def leave(self) -> str | None:
        write = self.setup.client.engine.setup.write
        await asyncio.to_thread(write, self.setup.target, self.setup.text())
        return None

    def draw(self, width: int) -> list[Content]:
        try:
            lines = self.setup.text().splitlines()
        except ENGINE_ERRORS as error:
            return [pair("not possible", str(error), width, style="$error")]
        return [Content.styled(line, MUTED if line.startswith("#") else "") for line in lines]


STEPS: Final = (Nodes, Model, Data, Method, File)
