"""The results of a task on what a run has trained, as lines of text for the command line and the run pane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.errors import plural
from tui.formatting import NOT_MEASURED, duration, rate, size, table

if TYPE_CHECKING:
    from engine.snapshots import RunSnapshot, ServedRequests
    from engine.task_result import Evaluated, Fused, Score, TaskResult


def result_lines(results: Sequence[TaskResult], *, ended: bool = False) -> Iterator[str]:
    """`ended`: a server answers no longer at its address."""
    losses = [result for result in results if result.kind == "evaluation"]
    if losses:
        headers = ("WEIGHTS", "SPLIT", "LOSS", "PERPLEXITY", "TOKENS", "TOOK")
        yield from table(headers, [_row(result) for result in losses]).splitlines()
    if scores := [result for result in results if result.kind == "score"]:
        yield from table(("TASK", "METRIC", "BASE", "TRAINED"), list(_score_rows(scores))).splitlines()
    for result in results:
        if result.kind == "fused":
            yield from _fused(result)
        elif result.kind == "answer":
            yield f"--- {result.variant} · {result.tokens:,} tokens · {rate(result.tokens_per_second)}"
            yield from result.text.splitlines()
        elif result.kind == "serving" and not ended:
            yield f"{result.model} answers at {result.address}" + (" to those who have its token" * result.token)


def served_text(served: ServedRequests) -> str:
    requests, tokens = plural(served.requests, "request"), plural(served.tokens, "token")
    return f"{requests} answered, {tokens}, {rate(served.tokens_per_second)}"


def serving_lines(snapshot: RunSnapshot, how_to_stop: str) -> Iterator[str]:
    """The requests that a server that goes on has answered. `how_to_stop`: "" where a console only reads."""
    if not snapshot.record.state.ended and any(result.kind == "serving" for result in snapshot.task_results):
        served = snapshot.ranks[0].served if snapshot.ranks else None
        text = served_text(served) if served is not None else "no request yet"
        text += " since it was restarted" * (snapshot.record.attempts > 1)
        yield "; ".join(filter(None, (text, how_to_stop)))


def _row(result: Evaluated) -> tuple[str, ...]:
    perplexity = f"{result.perplexity:,.3f}" if result.perplexity is not None else NOT_MEASURED
    loss = f"{result.loss:.4f}" if result.loss is not None else "not finite"
    figures = loss, perplexity, f"{result.tokens:,}", duration(result.seconds)
    return result.variant, result.split, *figures


def _score_rows(scores: Sequence[Score]) -> Iterator[tuple[str, ...]]:
    texts = {
        (score.task, score.metric, score.variant): f"{score.value:.4f}"
        + (f" ± {score.stderr:.4f}" if score.stderr is not None else "")
        for score in scores
    }
    for place in dict.fromkeys((score.task, score.metric) for score in scores):
        yield *place, *(texts.get((*place, variant), NOT_MEASURED) for variant in ("base", "adapter"))


def kept_text(result: Fused) -> str:
    return f"kept {result.kept:.1%} of the gain" if result.kept is not None else "no gain to keep"


def _fused(result: Fused) -> Iterator[str]:
    kept = kept_text(result)
    if result.accepted:
        yield f"fused: {result.path} ({size(result.bytes)}), {kept}"
        return
    yield f"not fused: {kept}" + (f": {result.why}" if result.why else "")
    for choice in result.choices:
        option = "--dequantize" if choice.dequantize else f"--bits {choice.bits}"
        yield f"  {option:<12}  {size(choice.bytes)}"
