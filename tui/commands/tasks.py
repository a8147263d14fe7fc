"""eval, fuse, generate and serve: the use of what a run has trained. Progress goes to stderr, the result to stdout."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from itertools import chain

from engine.api import Engine, ExitCode, TaskKind, TaskRequest, serve_request
from engine.errors import InputError
from engine.models import RunRecord, RunState
from engine.snapshots import RunSnapshot
from engine.task_result import Fused
from tui.commands.follow import Follower, print_end, until_ended
from tui.commands.launch import begin, follow_own, start_task
from tui.commands.terminal import Lines, print_json
from tui.task_results import result_lines


def evaluate(options: argparse.Namespace, engine: Engine) -> int:
    """Loss and perplexity of the base model and of what was trained, or their scores in lm-eval's tasks."""
    kind: TaskKind = "evaluate" if options.tasks is None else "lm_eval"
    names = {
        "evaluate": ("split", "batches"),
        "lm_eval": ("tasks", "limit", "num_fewshot", "include_path", "apply_chat_template"),
    }
    given = {name: value for name in chain(*names.values()) if (value := getattr(options, name)) is not None}
    if misplaced := [f"--{name.replace('_', '-')}" for name in given if name not in names[kind]]:
        why = f"{'without' if options.tasks is None else 'with'} --tasks it says nothing"
        raise InputError(misplaced[0], why=why, todo="leave it out")
    return _run(options, engine, TaskRequest(kind, given, divided=kind == "evaluate", saved=options.saved))


def fuse(options: argparse.Namespace, engine: Engine) -> int:
    """Fuse what was trained into the base model, and measure how much of the gain is kept."""
    chosen = {"keep": options.keep, "dequantize": options.dequantize, "bits": options.bits, "path": options.to}
    return _run(options, engine, TaskRequest("fuse", chosen, divided=options.divided, saved=options.saved))


def generate(options: argparse.Namespace, engine: Engine) -> int:
    """Answer prompts with the base model, with what was trained, or with both."""
    names = ("max_tokens", "temperature", "top_p", "seed", "raw")
    chosen = {name: getattr(options, name) for name in names}
    variants = ["base"] if options.base else ["base", "adapter"] if options.compare else ["adapter"]
    request = {**chosen, "prompts": options.prompt, "variants": variants}
    return _run(options, engine, TaskRequest("generate", request, divided=options.divided, saved=options.saved))


def serve(options: argparse.Namespace, engine: Engine) -> int:
    """Serve what was trained, until that is aborted; return once it answers, or with --follow at its end."""
    progress = Lines(sys.stderr)
    request = serve_request(options.host, options.port, options.max_tokens, divided=options.divided)
    request = replace(request, saved=options.saved)
    record, interrupts = begin(lambda: asyncio.run(start_task(engine, options.run, request)), progress)
    follower = Follower(engine, record.id, progress, quiet=True)
    try:
        interrupts.deliver()
        snapshot = follower.follow(until_served)
        token = engine.chats.token(record.id) if not snapshot.record.state.ended else None
        if not options.json:
            for text in (*result_lines(snapshot.task_results), *([f"token: {token}"] if token is not None else [])):
                Lines().say(text)
        if not snapshot.record.state.ended:
            progress.say(f"ask it: flightdeck chat --server {record.id}   stop it: flightdeck abort {record.id}")
        if options.follow:
            snapshot = follower.follow(until_ended)
    except KeyboardInterrupt:
        progress.say(f"\nno longer following; it goes on. To stop it: flightdeck abort {record.id}")
        return ExitCode.INTERRUPTED
    if options.json:
        print_json({**_document(snapshot), "token": token})
    if snapshot.record.state.ended:
        print_end(progress, snapshot)
        return ExitCode.FAILED
    return ExitCode.OK


def _document(snapshot: RunSnapshot) -> dict[str, object]:
    return {**snapshot.record.model_dump(mode="json"), "task_results": snapshot.task_results}


def until_served(snapshot: RunSnapshot) -> bool:
    return snapshot.record.state.ended or bool(snapshot.task_results)


def _run(options: argparse.Namespace, engine: Engine, request: TaskRequest) -> int:
    progress = Lines(sys.stderr)

    def start() -> RunRecord:
        return asyncio.run(start_task(engine, options.run, request))

    snapshot, interrupted = follow_own(engine, start, progress, quiet=True)
    refused = any(isinstance(result, Fused) and not result.accepted for result in snapshot.task_results)
    if snapshot.record.state is not RunState.SUCCEEDED and not refused:
        print_end(progress, snapshot)
    if options.json:
        print_json(_document(snapshot))
    else:
        for text in result_lines(snapshot.task_results):
            Lines().say(text)
    if interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if snapshot.record.state is RunState.SUCCEEDED else ExitCode.FAILED
