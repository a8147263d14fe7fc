"""runs, show, logs and metrics: what has happened, from the run's directory alone."""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict
from datetime import UTC, datetime

from engine.events import RunSnapshot
from engine.models import RunRecord
from engine.session import Engine
from tui.attempts import how_it_went, members
from tui.commands.follow import ending, lasted
from tui.commands.terminal import Lines, print_json
from tui.formatting import NOT_MEASURED, age, duration, loss, plural, rate, size, table

OK = 0
_EVIDENCE_LINES = 8
REPORT_KEYS = (
    "iteration",
    "train_loss",
    "learning_rate",
    "iterations_per_second",
    "tokens_per_second",
    "trained_tokens",
    "peak_memory",
    "val_loss",
    "val_time",
)
"""Columns of the CSV: mlx-lm's own names; a validation's row leaves the training's empty."""


def runs(options: argparse.Namespace, engine: Engine) -> int:
    """Every run, newest first."""
    records = engine.runs()
    if options.limit:
        records = records[: options.limit]
    if options.json:
        print_json([record.model_dump(mode="json") for record in records])
        return OK
    lines = Lines()
    if not records:
        lines.say("no runs yet: `flightdeck demo` makes one")
        return OK
    now = datetime.now(UTC)
    headers = ("RUN", "STATE", "WHY", "STARTED", "TOOK", "RANKS", "ITERATION", "LOSS", "VAL LOSS")
    # Coloured after padding: escape codes would count as width.
    drawn = table(headers, [_run_row(record, now) for record in records]).splitlines()
    lines.say(lines.ink(drawn[0], "dim"))
    for row, record in zip(drawn[1:], records, strict=True):
        lines.say(row.replace(f"  {record.state.value}", f"  {lines.word(record.state.value)}", 1))
    return OK


def _run_row(record: RunRecord, now: datetime) -> list[str]:
    started = age(record.created_at, now)
    return [
        record.id,
        record.state.value,
        record.reason.value if record.reason else NOT_MEASURED,
        started if started == "now" else f"{started} ago",
        duration(lasted(record, now)),
        str(record.world_size),
        _progress(record),
        loss(record.train_loss),
        loss(record.val_loss),
    ]


def _progress(record: RunRecord) -> str:
    if record.iteration is None:
        return NOT_MEASURED
    return f"{record.iteration}/{record.iterations}" if record.iterations else str(record.iteration)


def show(options: argparse.Namespace, engine: Engine) -> int:
    """One run: state, cause, fix, the lines that prove it, its ranks, and where its files are."""
    directory = engine.find(options.run)
    snapshot = engine.watch(directory.id).poll()
    record = snapshot.record
    if options.json:
        more = {
            "supervised": snapshot.supervised,
            "directory": directory.path,
            "diagnosis": asdict(snapshot.diagnosis) if snapshot.diagnosis is not None else None,
            "alarms": [asdict(alarm) for alarm in snapshot.alarms],
            "attempt_list": [asdict(attempt) for attempt in snapshot.attempts],
            "given_up": snapshot.given_up,
            "verification": [asdict(line) for line in snapshot.verification],
        }
        print_json({**record.model_dump(mode="json"), **more})
        return OK
    lines = Lines()
    state = lines.word(record.state.value)
    lines.say(f"{record.id}   {state}" + (f": {ending(record)}" if record.state.ended else ""))
    if not record.state.ended and not snapshot.supervised:
        lines.say(lines.ink("its supervisor is gone: the next `flightdeck` or `flightdeck abort` takes it over", "red"))
    for label, text in (("cause", snapshot.cause), ("fix", snapshot.fix)):
        if text:
            lines.say(f"  {label:<10} {text}")
    for line in engine.evidence(directory.id, snapshot, limit=_EVIDENCE_LINES):
        lines.say(f"    | {line}")
    if record.unconfirmed:
        lines.say(f"  {'unconfirmed':<10} {', '.join(record.unconfirmed)}")
    if record.excluded:
        lines.say(f"  {'left out':<10} {', '.join(record.excluded)}: the files there differ (worker_consistency)")
    _show_figures(lines, snapshot)
    _show_attempts(lines, snapshot)
    _show_ranks(lines, snapshot)
    _show_watch(lines, snapshot)
    lines.say(f"  {'files':<10} {directory.path}")
    lines.say(f"  {'logs':<10} flightdeck logs {record.id}")
    return OK


def _show_figures(lines: Lines, snapshot: RunSnapshot) -> None:
    record = snapshot.record
    world = f"{plural(record.world_size, 'rank')}, {record.backend}, {plural(record.attempts, 'attempt')}"
    lines.say(f"  {'world':<10} {world}")
    lines.say(f"  {'created':<10} {record.created_at.astimezone():%Y-%m-%d %H:%M:%S}")
    if record.iteration is not None:
        figures = [f"iteration {_progress(record)}", f"loss {loss(record.train_loss)}"]
        figures += [f"val loss {loss(record.val_loss)}"] if record.val_loss is not None else []
        figures += [rate(record.tokens_per_second)]
        figures += [f"ETA {duration(snapshot.eta_s)}"] if snapshot.eta_s is not None else []
        lines.say(f"  {'training':<10} {', '.join(figures)}")


def _show_attempts(lines: Lines, snapshot: RunSnapshot) -> None:
    """Each attempt of a run that has had more than one, and why there is no other."""
    before = None
    for attempt in snapshot.attempts if len(snapshot.attempts) > 1 else ():
        label = f"attempt {attempt.number}"
        lines.say(f"  {label:<10} {how_it_went(attempt)}")
        if (moved := members(attempt, before)) is not None:
            lines.say(f"  {'':<10} {moved}")
        before = attempt
    if snapshot.given_up is not None:
        lines.say(f"  {'no restart':<10} {snapshot.given_up}")


def _show_ranks(lines: Lines, snapshot: RunSnapshot) -> None:
    for rank in snapshot.ranks if snapshot.record.attempts else ():
        parts = [rank.phase]
        parts += [f"iteration {rank.iteration}"] if rank.iteration is not None else []
        parts += [f"{rank.step_s:.3f} s/step"] if rank.step_s is not None else []
        parts += [f"peak {size(rank.memory_bytes)}"] if rank.memory_bytes is not None else []
        parts += [f"exit {rank.exit_code}"] if rank.exit_code is not None else []
        parts += [f"signal {rank.signal}"] if rank.signal is not None else []
        lines.say(f"  {f'rank {rank.rank}':<10} {rank.node}: {', '.join(parts)}")


def _show_watch(lines: Lines, snapshot: RunSnapshot) -> None:
    """Alarms of the last attempt, and what must be true after a launch."""
    for alarm in snapshot.alarms:
        at = f"{alarm.at.astimezone():%H:%M:%S}" + (f", iteration {alarm.iteration}" if alarm.iteration else "")
        lines.say(f"  {'alarm':<10} {lines.ink(alarm.message, 'red')} ({alarm.name}, {at})")
    words = {True: "yes", False: "NO", None: "unknown"}
    for line in snapshot.verification:
        lines.say(f"  {line.name:<10} {words[line.good]}: {line.text}")


def metrics(options: argparse.Namespace, engine: Engine) -> int:
    """mlx-lm's report dicts in order, as a table, JSON or CSV."""
    reports = engine.metrics(options.run)
    if options.json or options.format == "json":
        print_json(reports)
    elif options.format == "csv":
        writer = csv.DictWriter(sys.stdout, REPORT_KEYS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(reports)
    else:
        headers = ("ITERATION", "LOSS", "VAL LOSS", "LEARNING RATE", "IT/S", "TOK/S", "TOKENS", "PEAK MEMORY")
        Lines().say(table(headers, [_metric_row(report) for report in reports]))
    return OK


def _metric_row(report: dict[str, object]) -> list[str]:
    def figure(key: str, form: str) -> str:
        value = report.get(key)
        return format(value, form) if isinstance(value, int | float) else NOT_MEASURED

    return [
        str(report.get("iteration", NOT_MEASURED)),
        figure("train_loss", ".4f"),
        figure("val_loss", ".4f"),
        figure("learning_rate", ".3e"),
        figure("iterations_per_second", ".3f"),
        figure("tokens_per_second", ",.0f"),
        figure("trained_tokens", ",.0f"),
        figure("peak_memory", ".3f"),
    ]
