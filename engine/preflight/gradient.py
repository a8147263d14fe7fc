"""gradient_layer: a real all_sum over a real mlx.launch ring of the real ranks, on ports and with a nonce of its own.

Without the right environment MLX makes a group of size 1 and says nothing: every rank would train alone. So the size is
compared with the configuration's, and every sum must be exact.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from engine.config.models import FlightConfig
from engine.launch.bundle import stage_bundle
from engine.launch.hostfile import as_configured, port_count, write_hostfile
from engine.launch.mlx_launch import arguments, rank_ends
from engine.launch.ports import ring_ports
from engine.models import CheckResult, CheckStatus
from engine.preflight import hostfile, versions
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.process import Finished, run
from engine.runs.layout import node_root
from engine.security.home import make_private
from engine.worker.processes import kill_with_nonce
from engine.worker.wire import NONCE_ENV, AllSumResult

NAME = "gradient_layer"
_START_ALLOWANCE_S = 55.0
"""For the ranks to find one another; worker.all_sum gives up by itself a little earlier."""
_NEWLINE_S = 0.25
_MOST_S = _START_ALLOWANCE_S + 5 * 60 + 10
"""Of the longest all_sum that a configuration may ask for."""

_CONSEQUENCES = re.compile(r"connection to a peer|Couldn't connect|peer does not answer|ended with -15\b")
"""Also of TERM: that is the launcher, once another rank has left."""
ADVICE = (
    (r"Couldn't bind|error: (98|48)\b", "the port was taken in that moment: run the check again"),
    (r"error: 65\b", "allow your terminal the Local Network in System Settings, Privacy & Security"),
    (r"Couldn't connect|does not answer", "check that the nodes reach each other on `ips`, and their firewall"),
)
"""(what a rank says, what a person can do about it), the first that fits."""


async def look(config: FlightConfig) -> CheckResult:
    nonce = secrets.token_hex(16)
    make_private(node_root())
    directory = node_root() / "preflight" / nonce
    directory.mkdir(parents=True, mode=0o700)
    try:
        finished = await _sum(config, directory, nonce)
        results = {rank: read_result(directory, rank) for rank, _ in ranks_of(config)}
        words = {rank: _last_words(directory, rank) for rank, _ in ranks_of(config)}
    finally:
        # Nothing of the check outlives it, not even what has left the launcher's group.
        kill_with_nonce(nonce)
        shutil.rmtree(directory, ignore_errors=True)
    return judge(config, results, words, finished)


async def _sum(config: FlightConfig, directory: Path, nonce: str) -> Finished:
    bundle = await asyncio.to_thread(stage_bundle, node_root())
    wiring = as_configured(config.nodes)
    hosts, script = directory / "hostfile.json", directory / "all_sum.sh"
    write_hostfile(hosts, wiring)
    script.write_text(all_sum_script(config, directory, bundle))
    argv = arguments(
        hostfile=hosts,
        starting_port=ring_ports(port_count(wiring)),
        program=["/bin/sh", str(script)],
        environment={NONCE_ENV: nonce},
    )
    return await run(
        argv,
        time_limit_s=_START_ALLOWANCE_S + 5 * config.preflight.all_sum_s,
        environment={NONCE_ENV: nonce, "PYTHONUNBUFFERED": "1"},
        newline_every_s=_NEWLINE_S,
    )


def all_sum_script(config: FlightConfig, directory: Path, bundle: Path) -> str:
    """What every rank runs: this rank's python on the all_sum, off the launcher's pipes, which cost it a core."""
    lines = ["#!/bin/sh", f"cd {shlex.quote(str(bundle))} || exit 126"]
    if len(config.nodes) == 1:
        # For a lone rank mlx.launch names an empty hostfile, which MLX then cannot parse.
        lines.append("unset MLX_HOSTFILE")
    lines.append('case "$MLX_RANK" in')
    for rank, node in ranks_of(config):
        program = [node.python, "-m", "worker.all_sum", "--seconds", str(config.preflight.all_sum_s)]
        program += ["--world-size", str(len(config.nodes)), "--backend", "ring"]
        program += ["--out", str(directory / "rank{rank}.json")]
        log = shlex.quote(str(directory / f"rank{rank}.log"))
        lines.append(f"{rank}) exec </dev/null >{log} 2>&1; exec {shlex.join(program)} ;;")
    return "\n".join([*lines, "esac", "exit 126", ""])


def read_result(directory: Path, rank: int) -> AllSumResult | None:
    """What one rank measured; None when it wrote nothing."""
    try:
        return AllSumResult(**json.loads((directory / f"rank{rank}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def judge(
    config: FlightConfig, results: Mapping[int, AllSumResult | None], words: Mapping[int, str], finished: Finished
) -> CheckResult:
    """The verdict. A rank that only lost its peers is not blamed while another has a cause of its own."""
    world_size = len(config.nodes)
    ends = dict(rank_ends(finished.stderr + finished.stdout))
    faults = {rank: _fault(results[rank], world_size, words[rank], ends.get(rank)) for rank in results}
    evidence = {
        node.name: f"rank {rank}: {faults[rank] or _measured(results[rank])}" for rank, node in ranks_of(config)
    }
    failed = {rank: fault for rank, fault in faults.items() if fault is not None}
    if failed:
        first = min(failed, key=lambda rank: (_CONSEQUENCES.search(failed[rank]) is not None, rank))
        node = config.nodes[first].name
        advice = next((text for pattern, text in ADVICE if re.search(pattern, failed[first])), None)
        summary = f"rank {first} on {node}: {failed[first]}" + (f"; {advice}" if advice else "")
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, blames=(first, node))
    if world_size == 1:
        return verdict(
            NAME, CheckStatus.PASS, "one rank, a group of 1 as planned: nothing is exchanged", evidence=evidence
        )
    measured = [result for result in results.values() if result is not None]
    slowest = max(result.latency_s or 0.0 for result in measured)
    narrowest = min(result.bandwidth_bytes_per_s or 0.0 for result in measured)
    summary = f"{world_size} ranks, exact, {slowest * 1e3:.2f} ms, {narrowest / 1e9:.2f} GB/s"
    return verdict(NAME, CheckStatus.PASS, summary, evidence=evidence)


def _fault(result: AllSumResult | None, world_size: int, words: str, code: int | None) -> str | None:
    if result is None:
        ended = f"ended with {code}" if code is not None else "wrote no result"
        return f"{ended}: {words}" if words else ended
    if result.error is not None:
        return result.error
    if result.size != world_size:
        return f"MLX made a group of {result.size} where {world_size} are planned"
    return None if result.exact else "the sum is not exact"


def _measured(result: AllSumResult | None) -> str:
    if result is None or result.latency_s is None or result.bandwidth_bytes_per_s is None:
        return "not measured"
    if result.size == 1:
        return "alone"
    return f"exact, {result.latency_s * 1e3:.2f} ms, {result.bandwidth_bytes_per_s / 1e9:.2f} GB/s"


def _last_words(directory: Path, rank: int) -> str:
    try:
        lines = (directory / f"rank{rank}.log").read_bytes()[-4096:].decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


CHECK = Check(
    NAME, "a real all_sum over the real ring", look, time_limit_s=_MOST_S, needs=(versions.NAME, hostfile.NAME)
)
