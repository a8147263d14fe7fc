"""The dialogs of what a run has left: what can be done with it, each by its letter or why it cannot be, the forms of a
fused model, and the confirmation of a task that takes nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Key

from tui.formatting import size
from tui.glyphs import MUTED
from tui.screens.dialog import Confirm, Dialog
from tui.state import DeckState
from tui.task_results import kept_text
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.snapshots import RunSnapshot
    from engine.task_result import Fused


@dataclass(frozen=True)
class DialogChoice:
    key: str
    label: str
    help: str
    why_not: str | None = None
    """Why it cannot be chosen now."""


Read = Callable[[], Awaitable[Sequence[DialogChoice] | None]]


class Choices(Dialog):
    """Answers the key of what was chosen. It may be opened before the choices are known."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "step(-1)", show=False),
        Binding("down,j", "step(1)", show=False),
        Binding("enter", "choose", show=False),
    ]

    def __init__(
        self,
        title: str,
        state: DeckState,
        width: int,
        choices: Sequence[DialogChoice] = (),
        *,
        read: Read | None = None,
    ) -> None:
        """`read`: the choices, where they are not known yet, or None when there are none."""
        self._choices = list(choices)
        self._read = read
        self._glyphs = state.glyphs
        self._width = width
        self._cursor = 0
        self._early: str | None = None
        """A key that came before the choices."""
        super().__init__(title, self._drawn())

    def on_mount(self) -> None:
        if self._read is not None:
            self.run_worker(self._fill(self._read))

    async def _fill(self, read: Read) -> None:
        if (choices := await read()) is None:
            self.dismiss(None)
            return
        self._choices = list(choices)
        self._cursor = next((at for at, choice in enumerate(choices) if choice.why_not is None), 0)
        self.set_body(self._drawn())
        if self._early is not None:
            self._choose(self._early)

    def on_key(self, event: Key) -> None:
        if not self._choices and event.is_printable and event.key not in ("j", "k", "q"):
            self._early = event.character
        elif event.character in [choice.key for choice in self._choices]:
            event.stop()
            self._choose(event.character)

    def action_step(self, direction: int) -> None:
        self._cursor = max(0, min(len(self._choices) - 1, self._cursor + direction))
        self.set_body(self._drawn())

    def action_choose(self) -> None:
        if self._choices:
            self._choose(self._choices[self._cursor].key)

    def _choose(self, key: str | None) -> None:
        """A choice that cannot be made keeps the dialog open, which says why."""
        at = next((at for at, choice in enumerate(self._choices) if choice.key == key), None)
        if at is not None and self._choices[at].why_not is None:
            self.dismiss(key)
        elif at is not None:
            self.action_step(at - self._cursor)

    def _drawn(self) -> list[Content]:
        if not self._choices:
            return [Content.styled("reading what the run has left", MUTED)]
        lines, room = [], max(10, *(len(choice.label) for choice in self._choices)) + 1
        for at, choice in enumerate(self._choices):
            mark = (">" if self._glyphs.ascii else "▸") if at == self._cursor else " "
            text = choice.help if choice.why_not is None else f"not now: {choice.why_not}"
            style = "bold $text-primary" if choice.why_not is None else MUTED
            line = pair(choice.label, text, self._width - 5, indent=room)
            lines.append(_indented(Content.assemble(mark, " ", (choice.key, style), "  "), line))
        return [*lines, Content(""), Content.styled("a letter or enter chooses, esc leaves", MUTED)]


def _indented(head: Content, text: Content) -> Content:
    blank = Content(" " * head.cell_length)
    return Content("\n").join([Content.assemble(blank if at else head, line) for at, line in enumerate(text.split())])


@dataclass(frozen=True)
class RunUse:
    """A run's result, as the choices need it."""

    snapshot: RunSnapshot
    nodes: tuple[str, ...]
    """Those from which a task takes the weights: the first is its rank 0."""
    why_no_tasks: str | None
    fused: tuple[Fused, ...] = ()
    """The outcomes of its fusions, newest first."""

    @property
    def run(self) -> str:
        return self.snapshot.record.id

    @property
    def node(self) -> str:
        return next(iter(self.nodes), "")

    @property
    def divided(self) -> bool:
        return self.snapshot.trained is not None and self.snapshot.trained.divided

    def on(self, kind: str) -> str:
        """The nodes that the task runs on: an evaluation is divided over all of the run."""
        everywhere = kind == "evaluate" or self.divided
        divided = [rank.node for rank in self.snapshot.ranks] if everywhere else ()
        return ", ".join(dict.fromkeys((*self.nodes, *divided)))


def uses(use: RunUse, state: DeckState) -> list[DialogChoice]:
    run, result, running, busy, taken = use.run, use.snapshot.result, state.running, state.busy, state.taken
    left = {"--best": "its best weights alone: ", "--checkpoint": "a checkpoint alone: fuse it, or "}
    no_files = f"it has not ended: `flightdeck fetch {run}` copies what it has saved so far" if result is None else None
    if result is not None and (option := result.fetch_option) != "":
        no_files = (
            f"it has left {left[option]}`{use.snapshot.fetch}`" if option else "it has left no weights with hashes"
        )
    served = running is not None and (running.task, running.source) == ("serve", run)
    unserved = use.snapshot.trained.unserved if use.snapshot.trained is not None else None
    no_server = use.why_no_tasks or unserved
    no_chat = no_server or (None if served else taken)
    task = use.why_no_tasks or taken
    fused = any(model.accepted for model in use.fused)
    divided = f", its layers divided over {use.on('serve')}" if use.divided else ""
    return [
        DialogChoice("c", "chat", f"ask it, beside its base model{divided}", no_chat),
        DialogChoice("e", "evaluate", "loss and perplexity, beside the base model's", task),
        DialogChoice("f", "fuse", f"into one model on {use.node}, and measure what is kept of the gain", task),
        DialogChoice(
            "s", "serve", f"by the OpenAI API, at 127.0.0.1:8080 of {use.node}, until it is stopped", no_server or taken
        ),
        DialogChoice("F", "fetch", f"copy its weights to ./{run} here", no_files or busy),
        DialogChoice(
            "p", "publish", "for LM Studio, Ollama, llama.cpp or the Hub", (None if fused else no_files) or busy
        ),
    ]


FORMS: Final[dict[str, dict[str, Any]]] = {
    "b": {},
    "d": {"dequantize": True},
    **{str(bits): {"bits": bits} for bits in (8, 6, 5, 4, 3, 2)},
}
"""The options of a fusion, by key."""


def forms(use: RunUse) -> list[DialogChoice]:
    """The fused model's forms, with the sizes that a refused fusion has reported."""
    refused = next((fused for fused in use.fused if not fused.accepted), None)
    sizes = {(choice.dequantize, choice.bits): size(choice.bytes) for choice in refused.choices} if refused else {}

    def sized(text: str, *, dequantize: bool = False, bits: int | None = None) -> str:
        size_text = sizes.get((dequantize, bits))
        return f"{text}, {size_text}" if size_text is not None else text

    tried = f" (tried: {kept_text(refused)})" if refused is not None else ""
    return [
        DialogChoice("b", "as it is", f"the base model's own form{tried}"),
        DialogChoice("d", "16 bits", sized("a quantized base's weights dequantized", dequantize=True)),
        *(
            DialogChoice(key, f"{key} bits", sized("a quantized base's weights, quantized anew", bits=int(key)))
            for key in FORMS
            if key.isdecimal()
        ),
    ]


_EFFECTS: Final = {
    "evaluate": "measures base model and trained weights on the test data, else on the validation data",
    "fuse": "writes a copy of the base model with what was trained; refused where less than 95 % of the gain is kept",
    "serve": "loads the model and answers at http://127.0.0.1:8080/v1 of {node}",
}


_DIVIDED: Final = ", one request at a time: its layers are divided over these nodes, as they were in the training"


def confirm_task(kind: str, use: RunUse, command: str, width: int) -> Confirm:
    lines = [
        pair("run", use.run, width, style="bold"),
        pair("on", use.on(kind), width),
        pair(
            "effect",
            _EFFECTS[kind].format(node=use.node) + (_DIVIDED if kind == "serve" and use.divided else ""),
            width,
        ),
        pair("lasts", "until ctrl+x stops it" if kind == "serve" else "its nodes are taken until its end", width),
        pair("command", f"flightdeck {command} {use.run}", width),
        pair("then", "it is shown as a run of its own; esc leads back to this one", width),
    ]
    return Confirm(f"{kind} the result of {use.run}?", lines, kind.capitalize())


TARGETS: Final = {"m": "lmstudio", "o": "ollama", "g": "gguf", "u": "hub"}
PLACES: Final = (
    DialogChoice("m", "LM Studio", "into the folder of its models here"),
    DialogChoice("o", "Ollama", "a folder with a Modelfile, here, and what to run next"),
    DialogChoice("g", "llama.cpp", "a folder with the weights, here, and the commands that make a GGUF"),
    DialogChoice("u", "the Hub", "the command that uploads it, with a model card"),
)


def publish_command(use: RunUse) -> str:
    fused = " --fused" if any(fused.accepted for fused in use.fused) else ""
    return f"flightdeck publish {use.run}{fused} --hub OWNER/NAME --private"
