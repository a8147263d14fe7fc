"""What the run pane says in words: the plan while nothing runs, a failure's first cause and fix, how a run ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.content import Content

from tui.attempts import how_it_went, members, recovered
from tui.formatting import age, duration, plural, rate
from tui.glyphs import MUTED, STATES, UNKNOWN
from tui.state import DeckState
from tui.widgets import plan_story
from tui.widgets.node_state import away
from tui.widgets.pairs import pair
from tui.widgets.shares_pane import shares

if TYPE_CHECKING:
    from engine.config.models import FlightConfig
    from engine.events import RunSnapshot


NAMED: Final = 8
"""Nodes that are named one by one; of more the rest is counted."""


def plan(state: DeckState, width: int, *, short: bool = False, full: bool = False) -> list[Content]:
    """What would be launched, on what, what it needs, and the one key that goes on; `short` leaves out blank lines,
    `full` has every reason."""
    if not state.ready:
        return [Content.styled("loading the engine", MUTED)]
    config = state.config
    if config is None:
        reason = state.fault or "there is no flightdeck.toml here"
        return [
            Content.styled("nothing to launch", "bold"),
            *[Content.styled(line, "$warning") for line in reason.splitlines()],
            Content.styled("5 shows earlier runs; n says what is missing", MUTED),
        ]
    refused = state.plan is not None and state.plan.refused
    title = ("refused by the plan  ", "$error") if refused else ("ready to launch  ", MUTED)
    lines = [Content.assemble(title, (config.job.name, "bold")), Content("")]
    if full and state.plan is not None:
        lines += [_go_on(state, width), Content(""), pair("needs", _needs(state), width, indent=16)]
        return [*lines, *plan_story.whole(state, width)]
    lines += [pair(label, text, width) for label, text in what(config, state)]
    lines += plan_story.brief(state, width)
    lines += [pair("needs", _needs(state), width), Content("")]
    if state.fault:
        lines += [pair("", line, width, style="$error", indent=0) for line in state.fault.splitlines()]
    lines.append(_go_on(state, width))
    return [line for line in lines if line.plain or not short]


def _go_on(state: DeckState, width: int) -> Content:
    """The one key that goes on, or why it does not."""
    from tui.actions import BY_ID

    blocked = BY_ID["launch"].why_not(state)
    if blocked:
        label = "n cannot launch now: "
        return pair("", label + blocked, width, indent=0).stylize("$warning", 0, len(label))
    return Content.assemble(("n", "bold $text-primary"), "  launches it, after you confirm")


def what(config: FlightConfig, state: DeckState) -> list[tuple[str, str]]:
    """The job and where it runs, as label and text."""
    separator = state.glyphs.separator
    job, settings = config.job, config.job.mlx_lm
    if job.command is not None:
        rows = [("command", " ".join(job.command))]
    else:
        rows = [("model", tail(job.model)), ("data", tail(job.data))]
        sizes = [f"{settings['iters']:,} iterations"] if "iters" in settings else []
        if "batch_size" in settings:
            sizes.append(f"global batch {settings['batch_size']}")
        if "learning_rate" in settings:
            sizes.append(f"learning rate {settings['learning_rate']:g}")
        kind = {"full": "full fine-tuning"}.get(job.fine_tune_type, job.fine_tune_type)
        rows.append(("training", separator.join([kind, *sizes])))
    parts = shares(state) or {}
    shared = [node.name for node in config.nodes if node.name in parts]
    names = [f"{name} {parts[name]:.0%}" for name in shared[:NAMED]]
    if len(shared) > NAMED:
        names.append(f"and {len(shared) - NAMED} more")
    backend = state.backend or "ring"
    rows.append(("on", separator.join([plural(len(shared), "rank"), backend, ", ".join(names)])))
    rows.append(("why", _why_shares(state, config)))
    if (told := _predicted(state)) is not None:
        rows.append(("expects", told))
    return rows


def hosts(config: FlightConfig) -> str:
    """Where the ranks run, as ssh reaches it."""
    named = ["this machine" if node.local else node.ssh for node in config.nodes]
    distinct = list(dict.fromkeys(named))
    more = f" and {len(distinct) - NAMED} more" if len(distinct) > NAMED else ""
    return ", ".join(distinct[:NAMED]) + more


def _why_shares(state: DeckState, config: FlightConfig) -> str:
    if len(config.nodes) == 1:
        return "one node: no link to wait for"
    if any(node.share is not None for node in config.nodes):
        return "shares as fixed in the configuration"
    if state.outlook is not None and state.outlook.calibration is not None:
        return f"shares {state.outlook.shares.reason}"
    return "equal shares: hardware calibration missing, assuming equal performance"


def _predicted(state: DeckState) -> str | None:
    """What calibration expects of the launch."""
    told = state.outlook.prediction if state.outlook is not None else None
    if told is None or told.tokens_per_s is None or told.speed_up is None:
        return None
    return f"{rate(told.tokens_per_s)}, speed-up {told.speed_up:.2f}"


def _needs(state: DeckState) -> str:
    if failures := state.failures():
        return f"preflight has {plural(failures, 'failure')}"
    if state.checks and state.checks_at is not None:
        return f"preflight, passed {state.ago(state.checks_at)}; it runs again before the ranks start"
    return "a passed preflight: it runs first, and stops the launch where a check fails"


def tail(path: str | None, keep: int = 3) -> str:
    """The end of a path, which tells one from another; the whole is in the plan."""
    if not path:
        return "none"
    parts = path.rstrip("/").split("/")
    return path if len(parts) <= keep + 1 else "…/" + "/".join(parts[-keep:])


def end(state: DeckState, snapshot: RunSnapshot, width: int) -> list[Content]:
    """How the shown run ended and why; the first cause and its fix when it failed. Empty while all is well."""
    record, glyphs = snapshot.record, state.glyphs
    if record.state == "succeeded":
        lasted = record.ended_at - record.created_at if record.ended_at else None
        took = duration(lasted.total_seconds() if lasted is not None else None)
        steps = plural(record.iterations, "iteration") if record.iterations else "all ranks"
        return [Content.assemble(glyphs.state(STATES["succeeded"], "succeeded"), f"  {steps} in {took}")]
    diagnosis = snapshot.diagnosis
    if record.state not in ("failed", "lost", "aborted") and diagnosis is None:
        if not snapshot.supervised and not snapshot.record.ended_at:
            return _unsupervised(state)
        return _away(state, snapshot, width)
    word = " ".join(part for part in (record.state, record.reason and f"({record.reason})") if part)
    place = _place(snapshot)
    lines = [Content.assemble(glyphs.state(STATES[record.state], word), (f"  {place}" if place else "", "bold"))]
    if snapshot.cause:
        lines.append(pair("first cause" if record.state == "failed" else "cause", snapshot.cause, width))
    if snapshot.fix:
        lines.append(pair("fix", snapshot.fix, width, style="bold"))
    if record.state == "aborted" and (kept := newest_checkpoint(snapshot)) is not None:
        lines.append(pair("kept", f"the checkpoint of iteration {kept:,}", width))
    failures = sum(check.status == "fail" for check in snapshot.checks)
    if record.reason == "preflight_failed" and failures:
        lines.append(pair("", f"{plural(failures, 'failed check')}: 2 shows evidence and fix", width))
    if record.excluded:
        lines.append(pair("left out", f"{', '.join(record.excluded)}: the files there differ", width, style="$warning"))
    if record.unconfirmed:
        nodes = ", ".join(record.unconfirmed)
        lines.append(pair("unconfirmed", f"the stop could not be proved on {nodes}", width, style="$error"))
    if diagnosis is not None and diagnosis.offset is not None:
        lines.append(pair("", "enter jumps to the line that proves it", width, style=MUTED))
    return lines


def attempts(snapshot: RunSnapshot, width: int, *, every: bool) -> list[Content]:
    """How a run that was interrupted has gone on, and who is in it by now; with `every`, each of its attempts."""
    told = snapshot.attempts
    lines = []
    if every and len(told) > 1:
        lines = [pair(f"attempt {attempt.number}", how_it_went(attempt), width) for attempt in told]
    elif (said := recovered(snapshot)) is not None:
        lines = [pair("recovery", said, width)]
    if len(told) > 1 and (moved := members(told[-1], told[0])) is not None:
        lines.append(pair("", moved, width, style=MUTED))
    if snapshot.given_up is not None and len(told) > 1:
        lines.append(pair("no restart", snapshot.given_up, width))
    return lines


def _away(state: DeckState, snapshot: RunSnapshot, width: int) -> list[Content]:
    """Nodes that the run's supervisor cannot reach: since when, why, and what comes of it."""
    lines: list[Content] = []
    for rank in snapshot.ranks:
        link = away(state, rank)
        if link is not None and len(lines) < NAMED:
            told = f"rank {rank.rank} on {rank.node}: {link.condition} for {age(link.since, state.now)}"
            why = f" ({link.why})" if link.why else ""
            mark = f"{state.glyphs.shape(UNKNOWN)} node" if not lines else ""
            lines.append(pair(mark, told + why, width, style="$warning"))
    if lines:
        lease = f"{state.config.recovery.lease_s:g} s" if state.config is not None else "its time"
        text = f"a rank trains on while its node is away; its lease ends it after {lease}"
        lines.append(pair("", text, width, style=MUTED))
    return lines


def _unsupervised(state: DeckState) -> list[Content]:
    return [Content.styled("? no supervisor is alive for this run; it is being adopted or fenced", "$warning")]


def _place(snapshot: RunSnapshot) -> str:
    """The rank and node that ended it, with its exit or signal."""
    record, parts = snapshot.record, []
    if record.rank is not None:
        parts.append(f"rank {record.rank}" + (f" on {record.host}" if record.host else ""))
    elif record.host:
        parts.append(record.host)
    if record.signal is not None:
        parts.append(f"signal {record.signal}")
    elif record.exit_code is not None:
        parts.append(f"exit {record.exit_code}")
    return ", ".join(parts)


def newest_checkpoint(snapshot: RunSnapshot) -> int | None:
    """Iteration of the newest committed checkpoint, None when there is none."""
    return max((mark.iteration for mark in snapshot.series.marks if mark.kind == "checkpoint"), default=None)
