"""The proof that nothing of an attempt is left: on which hosts it is sought, and what follows once it is there."""

from __future__ import annotations

from engine.protocol.attempt import END
from engine.run import events
from engine.run.decide import NodePresence
from engine.run.effects import Send, Settle
from engine.run.observation import HostView, Settled
from engine.run.running import take_in
from engine.run.shutdown import CleanupProof
from engine.run.state import Transition


def proof_of(t: Transition, host: HostView) -> CleanupProof:
    """For a host of the attempt that is watched, of which nothing is known, it is there unless it is sought."""
    stop = t.ending.stop
    proof = t.state.proofs.get(host.key) or (stop.proofs.get(host.key) if stop is not None else None)
    return proof or CleanupProof(found=host.current and t.state.sought.isdisjoint(host.names))


def unproved(t: Transition) -> list[str]:
    """Nodes on which it is not proved that nothing of the run is left."""
    return [name for host in t.seen.hosts if not proof_of(t, host).found for name in host.names]


def presence(t: Transition) -> tuple[NodePresence, ...]:
    """Every node of the run, as it answers now."""
    head_proved = all(proof_of(t, host).found for host in t.seen.hosts if host.local)
    nodes = {node: NodePresence(node, head_proved) for node in t.state.plan.nodes}
    for host in sorted(t.seen.hosts, key=lambda host: host.current):
        proved = proof_of(t, host).found and host.answering and head_proved
        nodes |= {name: NodePresence(name, proved, host.silent_s) for name in host.names}
    return tuple(nodes[node] for node in t.state.plan.nodes)


def seek_proofs(t: Transition) -> None:
    """Where it is not proved that nothing is left, and for files that have not been sent, on hosts that answer."""
    if t.state.watch is not None:
        take_in(t, live=False)
    for result in t.seen.finished:
        if isinstance(result, Settled):
            _take_settled(t, result)
    for host in t.seen.hosts:
        if host.answering and host.key not in t.ending.settling and not proof_of(t, host).found:
            _seek_proof(t, host)
    if t.state.watch is not None:
        lacking = t.state.attempt.ranks_with_missing_files
        if any(not host.unsent and not lacking.isdisjoint(host.ranks) for host in t.seen.current_hosts):
            # They have come by now, or it has not been looked for them yet.
            t.do(Settle(()))


def _seek_proof(t: Transition, host: HostView) -> None:
    proof, requests = proof_of(t, host).seek(host, t.seen.now)
    if requests and host.current:
        t.do(*(Send(host.key, rank, END) for rank in host.ranks if t.seen.ranks[rank].record is None))
    t.do(*requests)
    if proof.found and host.current:
        t.do(Settle((host.key,)))
        t.set_ending(settling=t.ending.settling | {host.key})
        return
    _set_proof(t, host, proof)
    if proof.found:
        _confirm(t, host)


def _take_settled(t: Transition, settled: Settled) -> None:
    for host in t.seen.hosts:
        if host.key in settled.hosts and host.key in t.ending.settling:
            t.set_ending(settling=t.ending.settling - {host.key})
            # One that goes away again in the middle of its log is waited for once more.
            _set_proof(t, host, CleanupProof(found=host.answering))
            if host.answering:
                _confirm(t, host)
    record_missing(t, settled)


def _set_proof(t: Transition, host: HostView, proof: CleanupProof) -> None:
    t.set(proofs={**t.state.proofs, host.key: proof})


def _confirm(t: Transition, host: HostView) -> None:
    for name in host.names:
        t.record(events.CleanupConfirmed(node=name))


def record_missing(t: Transition, settled: Settled) -> None:
    if dict(settled.missing) != dict(t.state.attempt.missing):
        t.record(events.LogsMissing(attempt=t.watch.number, files=dict(settled.missing)))
