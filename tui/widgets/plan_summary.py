"""The next launch as text: the job, its nodes and needs, a few lines of the training plan for the dashboard, and the
whole plan with the reason of every choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.content import Content

from engine import api
from engine.errors import plural
from tui.actions import BY_ID
from tui.formatting import rate, shortened
from tui.glyphs import FAIL, MUTED, WARN, Glyph
from tui.state import DeckState
from tui.widgets.shares_pane import shares
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.api import Config, TrainingPlan

_LABEL = 16
_SHOWN = 1
"""Refusals on the dashboard; the full view has all."""
_LINES = 2
"""Lines of each refusal there."""


NAMED_NODES: Final = 8
"""Nodes that are named one by one; of more the rest is counted."""

_WITHOUT: Final = (
    ("d", "runs the demo: it trains a tiny model on this machine, in a minute"),
    ("5", "shows earlier runs"),
    ("flightdeck init", "writes a configuration; given hosts, of these"),
)
"""The next steps where there is no configuration."""


def overview(state: DeckState, width: int, *, short: bool = False, full: bool = False) -> list[Content]:
    """The next launch: its job, its nodes, its needs and its key; `short` leaves out blank lines, `full` has every
    reason."""
    if not state.ready:
        return [Content.styled("loading the engine", MUTED)]
    config = state.config
    if config is None:
        reason = state.fault or "there is no flightdeck.toml here"
        return [
            Content.styled("waiting for your answer" if state.asking else "nothing to launch", "bold"),
            *[Content.styled(line, "$warning") for line in reason.splitlines()],
            Content(""),
            *[pair(key, text, width, indent=17) for key, text in _WITHOUT],
        ]
    refused = state.plan is not None and state.plan.refused
    title = ("refused by the plan  ", "$error") if refused else ("ready to launch  ", MUTED)
    lines = [Content.assemble(title, (config.job.name, "bold")), Content("")]
    if state.fault:
        faults = [pair("", line, width, style="$error", indent=0) for line in state.fault.splitlines()]
        lines += [*faults, Content("")]
    if full and state.plan is not None:
        lines += edited(state, width)
        lines += [_launch_key(state, width), Content(""), pair("needs", _needs(state), width, indent=16)]
        return [*lines, *whole(state, width)]
    lines += [pair(label, text, width) for label, text in job_rows(config, state)]
    lines += edited(state, width)
    lines += brief(state, width)
    lines += [pair("needs", _needs(state), width), Content("")]
    lines.append(_launch_key(state, width))
    return [line for line in lines if line.plain or not short]


def _launch_key(state: DeckState, width: int) -> Content:
    if state.busy == "launching":
        return Content.styled("launching: its run is shown in a moment", MUTED)
    blocked = BY_ID["launch"].why_not(state)
    if blocked:
        label = "n cannot launch now: "
        return pair("", label + blocked, width, indent=0).stylize("$warning", 0, len(label))
    return Content.assemble(("n", "bold $text-primary"), "  launches it, after you confirm")


def job_rows(config: Config, state: DeckState) -> list[tuple[str, str]]:
    """The job and where it runs, as label and text."""
    separator = state.glyphs.separator
    job, settings = config.job, config.job.mlx_lm
    if job.command is not None:
        rows = [("command", " ".join(job.shown_command))]
    else:
        rows = [("model", path_tail(job.model)), ("data", path_tail(job.data))]
        sizes = [plural(settings["iters"], "iteration")] if "iters" in settings else []
        if (epochs := settings.get("epochs")) is not None:
            sizes.append("1 epoch" if epochs == 1 else f"{epochs:g} epochs")
        if "batch_size" in settings:
            sizes.append(f"global batch {settings['batch_size']}")
        if (budget := settings.get("batch_tokens")) is not None:
            sizes.append(f"global batch of {budget:,} tokens")
        if (rate := settings.get("learning_rate")) is not None:
            sizes.append(f"learning rate {rate if isinstance(rate, str) else f'{rate:g}'}")
        kind = {"full": "full fine-tuning"}.get(job.fine_tune_type, job.fine_tune_type)
        kinds = [kind] if job.strategy == "data" else [kind, f"strategy {job.strategy}"]
        rows.append(("training", separator.join([*kinds, *sizes])))
    parts = shares(state) or {}
    shared = [node.name for node in config.nodes if node.name in parts]
    names = [f"{name} {parts[name]:.0%}" for name in shared[:NAMED_NODES]]
    if len(shared) > NAMED_NODES:
        names.append(f"and {len(shared) - NAMED_NODES} more")
    backend = state.backend or "ring"
    rows.append(("on", separator.join([plural(len(shared), "rank"), backend, ", ".join(names)])))
    rows.append(("why", _why_shares(state, config)))
    if (expected := _predicted(state)) is not None:
        rows.append(("expects", expected))
    return rows


def edited(state: DeckState, width: int) -> list[Content]:
    """The keys of the configuration that were changed, and the checks that are to be skipped."""
    text = shortened(", ".join(state.edits), 3 * width)
    lines = [pair("changed", text, width, style="$text-primary")] if text else []
    skips = {api.check_label(name): why for name, why in state.skips.items()}
    return lines + [pair("skips", f"{name}: {why}", width, style="$warning") for name, why in skips.items()]


def hosts(config: Config) -> str:
    """The ranks' hosts, as ssh names them."""
    named = ["this machine" if node.local else node.ssh for node in config.nodes]
    distinct = list(dict.fromkeys(named))
    more = f" and {len(distinct) - NAMED_NODES} more" if len(distinct) > NAMED_NODES else ""
    return ", ".join(distinct[:NAMED_NODES]) + more


def _why_shares(state: DeckState, config: Config) -> str:
    if len(config.nodes) == 1:
        return "one node: no link to wait for"
    if any(node.share is not None for node in config.nodes):
        return "shares as fixed in the configuration"
    if config.job.framework == "torch":
        return "equal shares, as ranks of a PyTorch job have them"
    if state.prediction is not None and state.prediction.calibration is not None:
        return f"shares {state.prediction.shares.reason}"
    return "equal shares: hardware calibration missing, assuming equal performance"


def _predicted(state: DeckState) -> str | None:
    predicted = state.prediction.throughput if state.prediction is not None else None
    if predicted is None or predicted.tokens_per_s is None or predicted.speed_up is None:
        return None
    return f"{rate(predicted.tokens_per_s)}, speed-up {predicted.speed_up:.2f}"


def _needs(state: DeckState) -> str:
    if failures := state.failures():
        return f"preflight has {plural(failures, 'failure')}"
    if state.checks and state.checks_at is not None:
        return f"preflight, passed {state.ago(state.checks_at)}; it runs again before the ranks start"
    return "a passed preflight: it runs first, and stops the launch where a check fails"


def path_tail(path: str | None, keep: int = 3) -> str:
    """The end of a path, its distinctive part; the plan has the whole."""
    if not path:
        return "none"
    parts = path.rstrip("/").split("/")
    return path if len(parts) <= keep + 1 else "…/" + "/".join(parts[-keep:])


def brief(state: DeckState, width: int) -> list[Content]:
    """The plan's memory, or its refusals, and the key to the whole plan."""
    plan = state.plan
    if plan is None:
        return [Content.styled("planning", MUTED)] if state.planning else []
    shown = plan.refusals[:_SHOWN]
    lines = [] if shown else [pair("memory", _memory(plan), width)]
    for refusal in shown:
        text = shortened(f"{refusal.name}: {refusal.text}", _LINES * max(16, width - 16))
        lines.append(pair(_marked(state, FAIL, "refused"), text, width, style="$error"))
    counts = [plural(len(plan.refusals) - len(shown), "more refusal")] if len(plan.refusals) > len(shown) else []
    counts += [plural(len(plan.warnings), "warning")] if plan.warnings else []
    if plan.advice:
        counts.append(f"{len(plan.advice)} pieces of advice" if len(plan.advice) > 1 else "one piece of advice")
    lines.append(pair("plan", ": ".join(filter(None, ["4 explains it", ", ".join(counts)])), width))
    return lines


def whole(state: DeckState, width: int) -> list[Content]:
    """The plan, its refusals, and the reason of each choice with the source of its figure."""
    plan = state.plan
    assert plan is not None
    lines = []
    for refusal in plan.refusals:
        override = f" (in spite of it: {refusal.override})" if refusal.override else ""
        text = f"{refusal.name}: {refusal.text}{override}"
        lines.append(pair(_marked(state, FAIL, "refused"), text, width, style="$error", indent=_LABEL))
    lines += [pair(label, text, width, indent=_LABEL) for label, text in api.summary(plan)]
    lines.append(Content(""))
    for warning in plan.warnings:
        text = f"{warning.name}: {warning.text}"
        lines.append(pair(_marked(state, WARN, "warn"), text, width, style="$warning", indent=_LABEL))
    for section, rows in api.explained(plan):
        lines += [Content(""), Content.styled(section, "bold")]
        lines += [pair("", f"{label}: {text}" if label else text, width, indent=2) for label, text in rows]
    command = plan.distributed_config.mlx_launch_command
    if command is not None:
        lines += [Content(""), Content.styled("without Flight Deck", "bold"), pair("", command, width, indent=2)]
    return lines


def _memory(plan: TrainingPlan) -> str:
    return dict(api.summary(plan))["memory"]


def _marked(state: DeckState, glyph: Glyph, word: str) -> str:
    return f"{state.glyphs.shape(glyph)} {word}"
