"""runs, show, metrics and logs: past and present runs, read from their directories alone."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from engine.api import (
    LAUNCHER_SOURCE,
    Engine,
    ExitCode,
    LogLine,
    LogReader,
    MetricsTrial,
    RunDir,
    RunWatch,
    safe_repr,
)
from engine.errors import InputError, plural, reason_text
from engine.models import Reason, RunRecord, RunState
from engine.snapshots import RunSnapshot
from tui.commands.follow import SupervisorRestart, ending, lasted
from tui.commands.terminal import Lines, config_file, loaded_config, print_json
from tui.formatting import (
    NOT_MEASURED,
    ago,
    attempt_summary,
    checkpoint_text,
    duration,
    loss,
    membership_change,
    memory,
    quiet_text,
    rate,
    result_text,
    resume_text,
    sample_texts,
    span,
    table,
    tracker_texts,
    train_loss,
    trained_text,
)
from tui.task_results import result_lines, serving_lines

_EVIDENCE_LINES = 8
_SHOWN = (
    *("supervised", "activity", "ranks", "diagnosis", "alarms", "given_up", "damage", "verification"),
    *("trained", "result", "trackers", "samples", "task_results"),
)
"""Parts of a snapshot in `show --json`, beside the record."""
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
    "test_loss",
    "test_ppl",
)
"""Columns of the CSV: mlx-lm's own names; a validation's row leaves the training's empty, and so does the test's."""

_COLUMNS = {
    "LOSS": ("train_loss", ".4f"),
    "VAL LOSS": ("val_loss", ".4f"),
    "TEST LOSS": ("test_loss", ".4f"),
    "LEARNING RATE": ("learning_rate", ".3e"),
    "IT/S": ("iterations_per_second", ".3f"),
    "TOK/S": ("tokens_per_second", ",.0f"),
    "TOKENS": ("trained_tokens", ",.0f"),
    "PEAK MEMORY": ("peak_memory", ".3f"),
}


def runs(options: argparse.Namespace, engine: Engine) -> int:
    records = engine.runs.select(options.filter, options.sort, options.limit)
    if options.json:
        print_json(records)
        return ExitCode.OK
    lines = Lines()
    if not records:
        lines.say("no run is like that" if options.filter else "no runs yet: `flightdeck demo` makes one")
        return ExitCode.OK
    now = datetime.now(UTC)
    headers = ("RUN", "STATE", "TASK", "WHY", "STARTED", "TOOK", "RANKS", "ITERATION", "LOSS", "VAL LOSS", "TAGS")
    # Coloured after padding: escape codes would count as width.
    drawn = table(headers, [_run_row(record, now) for record in records]).splitlines()
    lines.say(lines.ink(drawn[0], "dim"))
    for row, record in zip(drawn[1:], records, strict=True):
        lines.say(row.replace(f"  {record.state.value}", f"  {lines.word(record.state.value)}", 1))
    return ExitCode.OK


def _run_row(record: RunRecord, now: datetime) -> list[str]:
    return [
        record.id,
        record.state.value,
        record.task or NOT_MEASURED,
        reason_text(record.reason) or NOT_MEASURED,
        ago(record.created_at, now, at_once="now"),
        duration(lasted(record, now)),
        str(record.world_size),
        _progress(record),
        loss(record.train_loss),
        loss(record.val_loss),
        ", ".join(record.tags),
    ]


def _progress(record: RunRecord) -> str:
    if record.iteration is None:
        return NOT_MEASURED
    return f"{record.iteration}/{record.iterations}" if record.iterations else str(record.iteration)


def show(options: argparse.Namespace, engine: Engine) -> int:
    """One run: state, cause, fix, the lines that prove it, its ranks, and where its files are."""
    directory = engine.runs.find(options.run)
    snapshot = engine.runs.watch(directory.id).poll()
    record, written = snapshot.record, engine.runs.listed(directory.id)
    if options.json:
        more = {name: getattr(snapshot, name) for name in _SHOWN} | {
            "directory": directory.path,
            "attempt_list": snapshot.attempts,
            "tasks": engine.runs.tasks_of(record.id),
            "tags": written.tags,
            "note": written.note,
        }
        print_json({**record.model_dump(mode="json"), **more})
        return ExitCode.OK
    lines = Lines()
    state = lines.word(record.state.value)
    lines.say(f"{record.id}   {state}" + (f": {ending(record)}" if record.state.ended else ""))
    if not record.state.ended and not snapshot.supervised:
        lines.say(lines.ink("its supervisor is gone: the next `flightdeck` or `flightdeck abort` takes it over", "red"))
    cause = "note" if record.reason is Reason.COMPLETED else "cause"
    texts = {"tags": ", ".join(written.tags), "your note": written.note, cause: snapshot.cause, "fix": snapshot.fix}
    for label, text in texts.items():
        if text:
            lines.say(f"  {label:<10} {text}")
    for line in engine.runs.evidence(directory.id, snapshot, limit=_EVIDENCE_LINES):
        lines.say(f"    | {line}")
    if record.unconfirmed:
        lines.say(f"  {'unconfirmed':<10} {', '.join(record.unconfirmed)}")
    if record.excluded:
        lines.say(f"  {'left out':<10} {', '.join(record.excluded)}: the files there differ")
    for text in snapshot.damage:
        lines.say(f"  {'damage':<10} {text}")
    _show_figures(lines, snapshot)
    _show_attempts(lines, snapshot)
    _show_ranks(lines, snapshot)
    _show_watch(lines, snapshot)
    how_to_stop = f"to stop it: flightdeck abort {record.id}"
    for text in (*result_lines(snapshot.task_results, ended=record.state.ended), *serving_lines(snapshot, how_to_stop)):
        lines.say(f"  {text}")
    for label, text in sample_texts(snapshot.samples):
        lines.say(f"  {label:<10} {text}")
    _show_result(lines, snapshot)
    _show_tasks(lines, engine, record)
    for text in (text for tracker in snapshot.trackers for text in tracker_texts(tracker)):
        lines.say(f"  {'tracker':<10} {text}")
    lines.say(f"  {'files':<10} {directory.path}")
    lines.say(f"  {'logs':<10} flightdeck logs {record.id}")
    return ExitCode.OK


def _show_result(lines: Lines, snapshot: RunSnapshot) -> None:
    if (file := snapshot.trained) is not None:
        lines.say(f"  {'trained':<10} {trained_text(file)}")
        lines.say(f"  {'use it':<10} {file.command}")
    if (result := snapshot.result) is not None:
        texts = {"result": result_text(result), "checkpoint": checkpoint_text(result), "fetch": snapshot.fetch}
        for label, text in texts.items():
            if text:
                lines.say(f"  {label:<10} {text}")
    _show_again(lines, snapshot)


def _show_again(lines: Lines, snapshot: RunSnapshot) -> None:
    """How to go on with a training that has ended."""
    record = snapshot.record
    if record.repeats is not None:
        lines.say(f"  {'repeats':<10} {record.repeats}")
    if record.state.ended and record.task is None:
        if record.state not in (RunState.SUCCEEDED, RunState.COMPLETED):
            lines.say(f"  {'resume':<10} flightdeck resume {record.id}   {resume_text(snapshot)}")
        lines.say(f"  {'again':<10} flightdeck repeat {record.id} [--set KEY=VALUE]   as a new run")


def _show_tasks(lines: Lines, engine: Engine, record: RunRecord) -> None:
    if record.task is not None:
        lines.say(f"  {'task':<10} {record.task} of {record.source}")
    for task in engine.runs.tasks_of(record.id):
        lines.say(f"  {task.task or '':<10} {task.state}{f': {task.outcome}' if task.outcome else ''} ({task.id})")


def _show_figures(lines: Lines, snapshot: RunSnapshot) -> None:
    record = snapshot.record
    world = f"{plural(record.world_size, 'rank')}, {record.backend}, {plural(record.attempts, 'attempt')}"
    lines.say(f"  {'world':<10} {world}")
    lines.say(f"  {'created':<10} {record.created_at.astimezone():%Y-%m-%d %H:%M:%S}")
    if record.iteration is not None:
        figures = [f"iteration {_progress(record)}", f"loss {train_loss(snapshot)}"]
        figures += [f"val loss {loss(record.val_loss)}"] if record.val_loss is not None else []
        figures += [f"test loss {loss(record.test_loss)}"] if record.test_loss is not None else []
        figures += [rate(record.tokens_per_second)]
        figures += [f"ETA {span(snapshot.eta_s)}"] if snapshot.eta_s is not None else []
        lines.say(f"  {'training':<10} {', '.join(figures)}")
    elif snapshot.activity is not None:
        lines.say(f"  {'training':<10} {snapshot.activity}")


def _show_attempts(lines: Lines, snapshot: RunSnapshot) -> None:
    before = None
    for attempt in snapshot.attempts if len(snapshot.attempts) > 1 else ():
        label = f"attempt {attempt.number}"
        lines.say(f"  {label:<10} {attempt_summary(attempt)}")
        if (moved := membership_change(attempt, before)) is not None:
            lines.say(f"  {'':<10} {moved}")
        before = attempt
    if snapshot.given_up is not None:
        lines.say(f"  {'no restart':<10} {snapshot.given_up}")


def _show_ranks(lines: Lines, snapshot: RunSnapshot) -> None:
    for rank in snapshot.ranks if snapshot.record.attempts else ():
        parts = [rank.phase]
        parts += [f"iteration {rank.iteration}"] if rank.iteration is not None else []
        parts += [f"{rank.step_s:.3f} s/step"] if rank.step_s is not None else []
        parts += [f"peak {memory(rank.memory_bytes)}"] if rank.memory_bytes is not None else []
        parts += [f"exit {rank.exit_code}"] if rank.exit_code is not None else []
        parts += [f"signal {rank.signal}"] if rank.signal is not None else []
        lines.say(f"  {f'rank {rank.rank}':<10} {rank.node}: {', '.join(parts)}")


def _show_watch(lines: Lines, snapshot: RunSnapshot) -> None:
    for alarm in snapshot.alarms:
        at = f"{alarm.at.astimezone():%H:%M:%S}" + (f", iteration {alarm.iteration}" if alarm.iteration else "")
        lines.say(f"  {'alarm':<10} {lines.ink(alarm.message, 'red')} ({alarm.name}, {at})")
    if (silence := quiet_text(snapshot, datetime.now(UTC))) is not None:
        lines.say(f"  {'quiet':<10} {silence}")
    for text in snapshot.warnings:
        lines.say(f"  {'warning':<10} {lines.ink(text, 'yellow')}")
    marks = {True: "yes", False: "NO", None: "unknown"}
    for line in snapshot.verification:
        lines.say(f"  {line.name:<10} {marks[line.good]}: {line.text}")


def metrics(options: argparse.Namespace, engine: Engine) -> int:
    if options.chart is not None:
        # Textual draws it, which no other command of a run needs.
        from tui.commands.chart import metrics_chart

        return metrics_chart(options, engine)
    trial = _metrics_trial(options.tried, options, engine) if options.tried is not None else None
    reports = trial.reports if trial is not None else engine.runs.metrics(options.run)
    if options.json or options.format == "json":
        print_json(trial or reports)
    elif options.format == "csv":
        writer = csv.DictWriter(sys.stdout, REPORT_KEYS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(reports)
    else:
        tested = any("test_loss" in report for report in reports)
        columns = {header: column for header, column in _COLUMNS.items() if tested or header != "TEST LOSS"}
        headers = ["ITERATION", *columns, *(["LINE", "READ AS"] if trial is not None else [])]
        Lines().say(table(headers, [_metric_row(report, columns.values()) for report in reports]))
        for text in _trial_summary(trial) if trial is not None else ():
            Lines().say(text)
    return ExitCode.OK if trial is None or reports else ExitCode.FAILED


def _metrics_trial(file: Path, options: argparse.Namespace, engine: Engine) -> MetricsTrial:
    """The metrics that would be read from a file, with the pattern of the configuration where there is one."""
    named = options.config is not None or config_file(options).exists()
    job = loaded_config(options, engine).job if named else None
    try:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(file.open("rb")) if str(file) != "-" else sys.stdin.buffer
            return MetricsTrial(output, job.metrics if job is not None else None)
    except OSError as error:
        raise InputError(f"--try {safe_repr(str(file))}", why=error.strerror or str(error)) from error


def _trial_summary(trial: MetricsTrial) -> Iterator[str]:
    forms = ", ".join(sorted({report["read_as"] for report in trial.reports}))
    kinds = [report["kind"] for report in trial.reports]
    counts = f"{plural(kinds.count('train'), 'report')} and {plural(kinds.count('val'), 'validation')}"
    yield f"{plural(trial.lines, 'line')}: {counts}" + (f", read as {forms}" if forms else "")
    yield from (f"not read: {text}" for text in trial.unread)
    if not trial.reports:
        yield "[job] can say how they are printed: metrics = '''step (?P<step>[0-9]+) .* loss (?P<loss>[0-9.]+)'''"


def _metric_row(report: Mapping[str, object], columns: Iterable[tuple[str, str]]) -> list[str]:
    def figure(key: str, form: str) -> str:
        value = report.get(key)
        return format(value, form) if isinstance(value, int | float) else NOT_MEASURED

    return [
        str(report.get("iteration", NOT_MEASURED)),
        *(figure(key, form) for key, form in columns),
        *(str(report[key]) for key in ("line", "read_as") if key in report),
    ]


_POLL_S = 0.1
_BLOCK_LINES = 2_000
_BLOCK_BYTES = 1 << 20


def logs(options: argparse.Namespace, engine: Engine) -> int:
    """Print a run's log; with --follow until the run has ended and everything has been printed."""
    directory = engine.runs.find(options.run)
    watch = engine.runs.watch(directory.id)
    source: int | None = LAUNCHER_SOURCE if options.launcher else options.rank
    ranks = watch.poll().record.world_size
    if options.rank is not None and options.rank >= ranks:
        raise InputError(f"no rank {options.rank}", where=directory.id, why=f"it has ranks 0 to {ranks - 1}")
    restart = SupervisorRestart(engine, directory.id, Lines(sys.stderr))
    if options.raw:
        if source is None:
            raise InputError("--raw needs --rank or --launcher", why="the ranks' bytes are files of their own")
        if options.json or options.lines is not None:
            raise InputError("--raw gives the whole file", todo="leave out --json and --lines")
        _copy(directory, source, watch, restart, follow=options.follow)
        return ExitCode.OK
    lines = LogFollower(directory, source, watch, restart).lines(last=options.lines, follow=options.follow)
    if options.json:
        # One array, a line for each of the log's as it comes: the longest log needs no memory.
        start = "["
        for line in lines:
            print(f"{start}\n{json.dumps(_document(line))}", end="", flush=options.follow)
            start = ","
        print("[]" if start == "[" else "\n]")
        return ExitCode.OK
    for line in lines:
        label = "" if source is not None else f"{source_label(line.source):>{len(str(ranks - 1))}} | "
        print(label + line.text, flush=options.follow)
    return ExitCode.OK


class LogFollower:
    """The lines of a run in order of arrival, each once: what was given out is remembered by byte offset."""

    def __init__(self, directory: RunDir, source: int | None, watch: RunWatch, restart: SupervisorRestart) -> None:
        self._reader = LogReader(directory, source)
        self._watch = watch
        self._restart = restart
        self._given: dict[int, int] = {}
        """Source → offset of its last line that was given out."""
        self._partial: list[int] = []
        """Numbers of lines whose end had not come when they were looked at."""
        self._next = 0

    def lines(self, *, last: int | None = None, follow: bool = False) -> Iterator[LogLine]:
        """All lines, or the `last` ones; with `follow` until the run has ended."""
        self._reader.refresh()
        if last is not None:
            self._next = max(0, self._reader.line_count - last)
        while True:
            # Before reading: the output of an ended run is complete by then.
            ended = not follow or self._ended()
            if self._reader.refresh():
                # Line numbers start again; offsets do not.
                self._next, self._partial = 0, []
            yield from self._fresh(whole=ended)
            if ended:
                return
            time.sleep(_POLL_S)

    def _ended(self) -> bool:
        snapshot = self._watch.poll()
        self._restart.check(snapshot)
        return snapshot.record.state.ended

    def _fresh(self, *, whole: bool) -> Iterator[LogLine]:
        """The new lines; `whole` includes lines without an end."""
        waiting, self._partial = self._partial, []
        for number in waiting:
            yield from self._give(self._reader.lines(number, number + 1), whole)
        while self._next < self._reader.line_count:
            block = self._reader.lines(self._next, self._next + _BLOCK_LINES)
            if not block:
                return
            self._next = block[-1].number + 1
            yield from self._give(block, whole)

    def _give(self, lines: list[LogLine], whole: bool) -> Iterator[LogLine]:
        for line in lines:
            if line.offset <= self._given.get(line.source, -1):
                continue
            if line.partial and not whole:
                self._partial.append(line.number)
                continue
            self._given[line.source] = line.offset
            yield line


def source_label(source: int) -> str:
    return "launcher" if source == LAUNCHER_SOURCE else str(source)


def _document(line: LogLine) -> dict[str, object]:
    rank = None if line.source == LAUNCHER_SOURCE else line.source
    return {"rank": rank, "at": datetime.fromtimestamp(line.at, UTC).isoformat(), "text": line.text}


def _copy(directory: RunDir, source: int, watch: RunWatch, restart: SupervisorRestart, *, follow: bool) -> None:
    out = sys.stdout.buffer
    offset = 0
    while True:
        snapshot = watch.poll()
        ended = not follow or snapshot.record.state.ended
        if not ended:
            restart.check(snapshot)
        path = directory.log(source)
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                while block := file.read(_BLOCK_BYTES):
                    out.write(block)
                    offset += len(block)
            out.flush()
        if ended:
            return
        time.sleep(_POLL_S)
