"""The results of a task on what a run has trained: the `result` events of its rank 0, parsed here and nowhere else, as
the journal keeps them and the frontends show them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from engine.measurements import Count, Figure
from engine.models import FrozenModel
from engine.security.sanitise import sanitise_text


def _harmless(text: str) -> str:
    # The sign behind it keeps an empty last line, which `splitlines` leaves out.
    return sanitise_text("\n".join(f"{text}.".splitlines())[:-1])


Text = Annotated[str, Field(max_length=1_000_000), AfterValidator(_harmless)]
Variant = Literal["base", "adapter", "fused"]
"""The base model, with what was trained, and the one fused of both."""


class Evaluated(FrozenModel):
    kind: Literal["evaluation"] = "evaluation"
    variant: Variant
    split: Literal["test", "valid"]
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Mean cross-entropy over all target tokens, nats; null where it is not finite, as of weights that have
    diverged."""
    perplexity: Figure | None = None
    """e to the loss; null where that is beyond what a float holds."""
    tokens: Count
    seconds: Figure

    @property
    def summary(self) -> str:
        return f"{self.variant} {self.loss:.3f}" if self.loss is not None else f"{self.variant} not finite"


class Score(FrozenModel):
    """A figure of one of lm-eval's tasks."""

    kind: Literal["score"] = "score"
    variant: Variant
    task: Text
    metric: Text
    """With the name of lm-eval's filter, unless that is "none"."""
    value: Annotated[float, Field(allow_inf_nan=False)]
    stderr: Figure | None = None
    """Standard error; null where lm-eval has none."""

    @property
    def summary(self) -> str:
        return self.task


class FuseChoice(FrozenModel):
    """Another form of the fused model."""

    dequantize: bool = False
    bits: Count | None = None
    bytes: Count


class Fused(FrozenModel):
    kind: Literal["fused"] = "fused"
    path: Text
    """On the node of rank 0; nothing is there where it was not accepted."""
    bytes: Count
    kept: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """(base loss - fused loss) / (base loss - adapter loss); null where there was no gain."""
    accepted: bool
    why: Text | None = None
    choices: tuple[FuseChoice, ...] = Field(default=(), max_length=20)

    @property
    def summary(self) -> str:
        kept = f"kept {self.kept:.1%}" if self.kept is not None else "no gain to keep"
        return kept if self.accepted else f"refused: {kept}"


class Answer(FrozenModel):
    kind: Literal["answer"] = "answer"
    variant: Variant
    prompt: Text
    text: Text
    tokens: Count
    prompt_tokens: Count
    tokens_per_second: Figure
    peak_memory_bytes: Count | None = None
    """The highest of all ranks."""

    @property
    def summary(self) -> str:
        return f"{self.variant} answered"


class Served(FrozenModel):
    """A server answers: it has generated a first token."""

    kind: Literal["serving"] = "serving"
    address: Text
    """That of the OpenAI-compatible API, as on the node of rank 0."""
    model: Text
    token: bool
    """Clients need one."""

    @property
    def summary(self) -> str:
        return self.address


TaskResult = Annotated[Evaluated | Score | Fused | Answer | Served, Field(discriminator="kind")]
