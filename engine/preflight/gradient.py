"""gradient_layer: a real all_sum over a real mlx.launch ring of the real ranks, on ports and with a nonce of its own.

Without the right environment MLX makes a group of size 1 and says nothing: every rank would train alone. So the size is
compared with the configuration's, and every sum must be exact.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.launch import ssh_shim
from engine.launch.asking import at_once
from engine.launch.environment import ranks_per_host
from engine.launch.hostfile import write_hostfile
from engine.launch.mlx_launch import arguments, rank_ends
from engine.launch.place import Place
from engine.launch.ports import fresh_ports
from engine.models import CheckResult, CheckStatus
from engine.preflight import connectivity, hostfile, versions
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.process import Finished, run
from engine.preflight.scene import Scene
from engine.runs.layout import node_root
from engine.security.home import make_private
from engine.security.sanitise import plain
from engine.transport.base import Completed, Transport
from engine.transport.openssh import write_openssh_config
from engine.worker.wire import NONCE_ENV, AllSumResult

NAME = "gradient_layer"
_START_ALLOWANCE_S = 55.0
"""For the ranks to find one another; worker.all_sum gives up by itself a little earlier."""
_NEWLINE_S = 0.25
_SWEEP_S = 3.0
_ATTEMPT = 1
_READ_BYTES = 1 << 20
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


async def look(scene: Scene) -> CheckResult:
    nonce = secrets.token_hex(16)
    # A folder like an attempt's, so that what starts an attempt's ranks starts these.
    check_id = f"preflight-{nonce[:12]}"
    make_private(node_root())
    with tempfile.TemporaryDirectory(prefix="preflight-", dir=node_root()) as here:
        try:
            finished = await _sum(scene, check_id, nonce, Path(here))
            read = await scene.on_all(lambda node: _read(scene, node, check_id))
        finally:
            # Nothing of the check outlives it, on any node, not even what has left the launcher's group.
            left = await asyncio.shield(_clear(scene, check_id, nonce))
        words = {rank: _shim_words(Path(here), rank) for rank, _ in ranks_of(scene.config)}
    results: dict[int, AllSumResult | None] = {}
    for rank, node in ranks_of(scene.config):
        answer = read[node.name]
        found, logs = ({}, {}) if isinstance(answer, FlightDeckError) else answer
        results[rank] = found.get(rank)
        words[rank] = logs.get(rank) or words[rank] or (str(answer) if isinstance(answer, FlightDeckError) else "")
    result = judge(scene.config, results, words, finished)
    if left:
        return result.model_copy(update={"status": CheckStatus.FAIL, "summary": f"{result.summary}; {left}"})
    return result


async def _sum(scene: Scene, check_id: str, nonce: str, here: Path) -> Finished:
    config = scene.config
    wiring, places = await scene.wiring(), await scene.places()
    await at_once(_put(scene, place, check_id) for place in places)
    hosts = here / "hostfile.json"
    write_hostfile(hosts, wiring)
    environment = {NONCE_ENV: nonce, "PYTHONUNBUFFERED": "1"}
    local = next((place for place in places if config.nodes[place.ranks[0]].local), None)
    if local is not None:
        environment[ssh_shim.NODE_ROOT_ENV] = local.root
    if scene.remote:
        write_openssh_config(here / "ssh_config", scene.fleet.home)
        folder = ssh_shim.write_shim(here, here / "ssh_config", check_id, _ATTEMPT)
        environment["PATH"] = f"{folder}:{os.environ.get('PATH', os.defpath)}"
    argv = arguments(
        hostfile=hosts,
        starting_port=await fresh_ports(scene.fleet, config.nodes, wiring),
        program=ssh_shim.program(check_id, _ATTEMPT),
        environment={NONCE_ENV: nonce},
        backend=wiring.backend,
        ranks_per_host=ranks_per_host(wiring),
    )
    return await run(
        argv,
        time_limit_s=_START_ALLOWANCE_S + 5 * config.preflight.all_sum_s,
        environment=environment,
        newline_every_s=_NEWLINE_S,
    )


async def _put(scene: Scene, place: Place, check_id: str) -> None:
    directory = _directory(place, check_id)
    script = all_sum_script(scene.config, place, directory, (await scene.wiring()).backend)
    node = scene.config.nodes[place.ranks[0]]
    try:
        await scene.transport(node).put_tree(directory, {"start.sh": script.encode()})
    except OSError as error:
        why = error.strerror or str(error)
        raise LaunchError(
            "the check's script could not be written", where=f"{node.name}:{directory}", why=why
        ) from error


def all_sum_script(config: FlightConfig, place: Place, directory: PurePosixPath, backend: str) -> str:
    """What the ranks of a host run: its python on the all_sum, off the launcher's pipes, which cost it a core."""
    lines = ["#!/bin/sh", f"cd {shlex.quote(place.bundle)} || exit 126"]
    if len(config.nodes) == 1:
        # For a lone rank mlx.launch names an empty hostfile, which MLX then cannot parse.
        lines.append("unset MLX_HOSTFILE")
    lines.append('case "$MLX_RANK" in')
    for rank in place.ranks:
        program = [place.expanded(config.nodes[rank].python), "-m", "worker.all_sum"]
        program += ["--seconds", str(config.preflight.all_sum_s), "--world-size", str(len(config.nodes))]
        program += ["--backend", backend, "--out", str(directory / "rank{rank}.json")]
        log = shlex.quote(str(directory / f"rank{rank}.log"))
        lines.append(f"{rank}) exec </dev/null >{log} 2>&1; exec {shlex.join(program)} ;;")
    return "\n".join([*lines, "esac", "exit 126", ""])


Found = tuple[dict[int, AllSumResult | None], dict[int, str]]


async def _read(scene: Scene, node: NodeConfig, check_id: str) -> Found:
    """What the ranks of a node's host measured, and the last that each of them said."""
    place, transport = await scene.place_of(node), scene.transport(node)
    results: dict[int, AllSumResult | None] = {}
    words: dict[int, str] = {}
    for rank in place.ranks:
        results[rank] = parse_result(await _content(transport, _directory(place, check_id) / f"rank{rank}.json"))
        said = await _content(transport, _directory(place, check_id) / f"rank{rank}.log")
        words[rank] = plain(Completed(None, said[-4096:], b"").last_words)
    return results, words


async def _content(transport: Transport, path: PurePosixPath) -> bytes:
    try:
        return await transport.read_from(path, 0, _READ_BYTES)
    except OSError:
        return b""


def parse_result(content: bytes) -> AllSumResult | None:
    """What one rank measured; None when it wrote nothing."""
    try:
        return AllSumResult(**json.loads(content))
    except (ValueError, TypeError):
        return None


async def _clear(scene: Scene, check_id: str, nonce: str) -> str:
    """End what is left of the check on every host, and its files; in words what could not be ended."""
    try:
        places = await scene.places()
    except FlightDeckError:
        # Then nothing has been started anywhere.
        return ""

    async def sweep(place: Place) -> str:
        node = scene.config.nodes[place.ranks[0]]
        try:
            said = await scene.look(node, "nonce", nonce, str(_SWEEP_S), timeout_s=_SWEEP_S + 10)
            if said["left"]:
                return f"on {node.name} is left: {plain(said['left'][0], 100)}"
            run_folder = str(_directory(place, check_id).parent.parent)
            await scene.transport(node).run(["rm", "-rf", "--", run_folder], timeout_s=10)
        except (FlightDeckError, OSError) as error:
            return f"whether anything is left on {node.name} is not known: {error}"
        return ""

    return "; ".join(filter(None, await asyncio.gather(*(sweep(place) for place in places))))


def _directory(place: Place, check_id: str) -> PurePosixPath:
    return PurePosixPath(place.root) / "runs" / check_id / "attempts" / str(_ATTEMPT)


def _shim_words(here: Path, rank: int) -> str:
    """What ssh itself has said about a rank."""
    try:
        return plain(Completed(None, ssh_shim.words_of(here, rank).read_bytes()[-4096:], b"").last_words)
    except OSError:
        return ""


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


CHECK = Check(
    NAME,
    "a real all_sum over the real ring",
    look,
    time_limit_s=_MOST_S,
    needs=(connectivity.NAME, versions.NAME, hostfile.NAME),
)
