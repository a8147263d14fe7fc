"""init: a first flightdeck.toml, from hosts that are named or found."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.api import (
    Config,
    DraftJob,
    DraftNode,
    Engine,
    ExitCode,
    FoundHost,
    FoundPython,
    answer_form,
    check_target,
    draft,
    draft_nodes,
    find_job,
    hosts_from_hostfile,
    hosts_from_names,
    is_beside,
    safe_repr,
    write_draft,
)
from engine.errors import InputError, plural
from tui.commands.terminal import DEFAULT_FILE, Lines, agreed_to, agreed_to_key, is_person, print_json
from tui.formatting import table

_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_STDOUT = Path("-")
_METHODS = ("lora", "dora", "full")


def init(options: argparse.Namespace, engine: Engine) -> int:
    """Write the file and say what comes next; 2 when there is nothing to write or a file in the way, 1 when with --yes
    a node is left without mlx."""
    target: Path = options.output or DEFAULT_FILE
    if target != _STDOUT:
        check_target(target, force=options.force)
    for key, text in (("model", options.model), ("data", options.data)):
        if text and (accepted := answer_form(key, text)):
            raise InputError(f"--{key} {safe_repr(text)}", why=f"expected {accepted}")
    progress = Lines(sys.stderr)
    hostfile = hosts_from_hostfile(options.hostfile) if options.hostfile else None
    hosts = hostfile.hosts if hostfile else _choose(options, engine, progress)
    if not hosts:
        progress.say(
            "flightdeck: no host was chosen (name some: flightdeck init ana@ultra.local …, or take all with --yes)"
        )
        return ExitCode.USAGE
    asks = is_person(sys.stdin) and is_person(progress.stream) and not options.json
    pythons = asyncio.run(_ask(engine, hosts, progress, options.trust, asks=asks))
    folder = Path.cwd() if target == _STDOUT else target.absolute().parent
    remote = any(not host.here for host in hosts)
    job = find_job(folder, remote=remote)
    settings = _settings(options, job, progress, asks=asks)
    push = is_beside(settings["data"], folder) if "data" in settings else job.push
    job = replace(job, env=hostfile.env if hostfile else {}, settings=settings, push=push and remote)
    backend = (hostfile.backend if hostfile else None) or "auto"
    write = partial(draft, cluster=options.name or folder.name, backend=backend, job=job)
    if target != _STDOUT and (options.yes or asks) and any(python.lacks_mlx for python in pythons):
        config = engine.setup.config(target, write(draft_nodes(hosts, pythons)))
        made = asyncio.run(_make(engine, config, pythons, progress, asks=not options.yes))
        pythons = [python.made(made.get(host.ssh)) for host, python in zip(hosts, pythons, strict=True)]
    nodes = draft_nodes(hosts, pythons)
    text = write(nodes)
    digest = engine.setup.config(target, text).digest
    if target != _STDOUT:
        write_draft(target, text, force=options.force)
        engine.nodes.accept(digest)
    if options.json:
        _print_document(target, text, nodes, pythons)
    elif target == _STDOUT:
        print(text, end="")
    else:
        _say_next(Lines(), target, nodes, pythons, job)
    return ExitCode.FAILED if options.yes and any(python.lacks_mlx for python in pythons) else ExitCode.OK


def _choose(options: argparse.Namespace, engine: Engine, progress: Lines) -> list[FoundHost]:
    """The named hosts and, of those that were found, the ones that are wanted."""
    named = hosts_from_names(options.hosts)
    looking = options.from_ssh_config or options.bonjour
    if named and not looking:
        return named
    ssh_config, bonjour = options.from_ssh_config or not looking, options.bonjour or not looking
    if bonjour and is_person(progress.stream):
        progress.say("searching for machines with ssh …")
    named_ssh = {host.ssh for host in named}
    everyone = asyncio.run(engine.nodes.discover(ssh_config=ssh_config, bonjour=bonjour))
    others = [host for host in everyone if host.ssh not in named_ssh]
    if options.yes:
        return named + others
    if is_person(sys.stdin) and is_person(progress.stream) and not options.json:
        return named + _ask_which(others, progress)
    if named:
        return named
    if options.json:
        print_json({"file": None, "found": others})
    else:
        Lines().say(_list(others))
    return []


def _list(hosts: Sequence[FoundHost]) -> str:
    rows = [
        [str(number), host.name, host.ssh, " and ".join(host.sources), host.about]
        for number, host in enumerate(hosts, start=1)
    ]
    return table(("", "NAME", "SSH", "FOUND IN", ""), rows)


def _ask_which(hosts: Sequence[FoundHost], progress: Lines) -> list[FoundHost]:
    """The hosts that a person chooses; repeats until the answer is valid."""
    progress.say(_list(hosts))
    while True:
        answer = _typed("which, in rank order (as 1 3-4, or all; empty: none)? ", progress)
        numbers = chosen_numbers(answer, len(hosts))
        if numbers is not None:
            return [hosts[number - 1] for number in numbers]
        progress.say(f"numbers from 1 to {len(hosts)}, please")


def chosen_numbers(answer: str, count: int) -> list[int] | None:
    """The numbers that "1 3-4" or "all" names, each once, in that order; None for what names something else."""
    if answer.strip().lower() == "all":
        return list(range(1, count + 1))
    numbers: list[int] = []
    for word in answer.replace(",", " ").split():
        match = _RANGE.fullmatch(word)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= count:
            return None
        numbers += [number for number in range(first, last + 1) if number not in numbers]
    return numbers


def _settings(options: argparse.Namespace, job: DraftJob, progress: Lines, *, asks: bool) -> dict[str, Any]:
    """Keys of [job], by options; a person is asked for a model, data and a method that nothing else names."""
    given = {"model": options.model, "data": options.data, "fine_tune_type": options.method, "iters": options.iters}
    if asks and not options.yes:
        for key in [key for key in job.missing if not given[key]]:
            question = f"{key} (a folder on the nodes, or its name; empty: later)? "
            while (answer := _typed(question, progress)) and (accepted := answer_form(key, answer)):
                progress.say(f"{accepted}, please")
            given[key] = answer
        while job.config is None and given["fine_tune_type"] not in ("", *_METHODS):
            given["fine_tune_type"] = _typed(f"method ({', '.join(_METHODS)}; empty: {_METHODS[0]})? ", progress)
    return {key: value for key, value in given.items() if value}


def _typed(question: str, progress: Lines) -> str:
    """Empty at the end of the input."""
    progress.stream.write(question)
    progress.stream.flush()
    try:
        return input().strip()
    except EOFError:
        progress.say()
        return ""


async def _make(
    engine: Engine, config: Config, pythons: Sequence[FoundPython], progress: Lines, *, asks: bool
) -> dict[str, str]:
    """Environments on the nodes that have no mlx: host → its python; none where one has failed, which is said."""
    async with engine:
        names = [node.name for node, python in zip(config.nodes, pythons, strict=True) if python.lacks_mlx]
        plans = await engine.environments.plan(config, names)
        for plan in plans:
            progress.wrap(f"{plan.node}: ", plan.describe(), 2)
        if any(plan.problem for plan in plans) or (asks and not agreed_to("make them?", progress)):
            return {}
        failed = False
        async for step in engine.environments.make(config, [plan for plan in plans if not plan.made]):
            progress.wrap(f"{step.node}: ", step.text, 2)
            failed = failed or step.failed
    return {} if failed else {plan.ssh: plan.python for plan in plans}


async def _ask(
    engine: Engine, hosts: Sequence[FoundHost], progress: Lines, trusted: Sequence[str], *, asks: bool
) -> list[FoundPython]:
    """New host keys are accepted where they are `trusted`; with `asks` a person is asked for each other one. What shows
    one that is accepted is asked again."""
    if is_person(progress.stream):
        progress.say(f"asking {plural(len(hosts), 'host')} for a python with mlx and mlx-lm …")
    async with engine:
        pythons = await engine.nodes.find_pythons([host.ssh for host in hosts])
        offers = dict.fromkeys(python.host_key for python in pythons if python.host_key is not None)
        accepted = [
            offer for offer in offers if offer.fingerprint in trusted or (asks and agreed_to_key(offer, progress))
        ]
        for offer in accepted:
            await engine.nodes.accept_host_key(offer)
        again = [host.ssh for host, python in zip(hosts, pythons, strict=True) if python.host_key in accepted]
        answers = dict(zip(again, await engine.nodes.find_pythons(again), strict=True)) if again else {}
    return [answers.get(host.ssh, python) for host, python in zip(hosts, pythons, strict=True)]


def _print_document(target: Path, text: str, nodes: Sequence[DraftNode], pythons: Sequence[FoundPython]) -> None:
    documents = [
        {"name": node.name, "ssh": node.ssh, "python": probe.python, "about": probe.about, "host_key": probe.host_key,
         "problem": probe.problem or None, "todo": probe.todo or None}
        for node, probe in zip(nodes, pythons, strict=True)
    ]  # fmt: skip
    print_json({"file": str(target), "text": text, "nodes": documents})


def _say_next(
    lines: Lines, target: Path, nodes: Sequence[DraftNode], pythons: Sequence[FoundPython], job: DraftJob
) -> None:
    lines.say(f"{lines.ink('wrote', 'green')} {target}: {plural(len(nodes), 'node')}")
    width = max(len(node.name) for node in nodes)
    for node, probe in zip(nodes, pythons, strict=True):
        if probe.python is not None:
            lines.say(f"  {node.name:<{width}}  {probe.python}  {probe.about}")
        else:
            todo = f" ({probe.todo})" if probe.todo and probe.host_key is None else ""
            lines.say(f"  {node.name:<{width}}  {lines.ink('not verified', 'yellow')}: {probe.problem}{todo}")
    named = f" -c {target}" if target != DEFAULT_FILE else ""
    unknown = [(node, probe.host_key) for node, probe in zip(nodes, pythons, strict=True) if probe.host_key is not None]
    lines.say("next:")
    if unknown:
        lines.say(f"  flightdeck nodes{named}       accept these host keys, compared on each machine itself:")
        for node, key in unknown:
            lines.say(f"      {node.ssh}  {key.fingerprint}")
    if job.missing:
        lines.say(f"  edit {target}: [job] {' and '.join(job.missing)}")
    if not unknown:
        lines.say(f"  flightdeck nodes{named}       facts, versions, links")
    lines.say(f"  flightdeck preflight{named}   everything that a launch needs")
    lines.say(f"  flightdeck{named}             the console: n launches")
