"""Nodes that a run goes on without: whether anything of it is left there, and whether they are back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from engine.supervision.abort import Proof


class Remnants:
    """The links to such nodes, each with the proof of its own last attempt there."""

    def __init__(self, enter: Callable[..., Any]) -> None:
        """`enter` is the journal's."""
        self._enter = enter
        self._proofs: list[Proof] = []

    def keep(self, proofs: Iterable[Proof]) -> None:
        """Look after these from now on; their links are ours."""
        self._proofs += proofs

    def look(self, now: float) -> None:
        """Ask those that answer, until nothing is left there; what is left is killed."""
        for proof in self._proofs:
            if not proof.found and proof.link.state.answering:
                proof.seek(now)
                if proof.found:
                    for name in proof.link.names:
                        self._enter("confirmed", node=name)

    def of(self, node: str) -> Proof | None:
        return next((proof for proof in self._proofs if node in proof.link.names), None)

    @property
    def unconfirmed(self) -> list[str]:
        return [name for proof in self._proofs if not proof.found for name in proof.link.names]

    async def release(self, nodes: Iterable[str]) -> None:
        """These are in an attempt again, which has links of its own to them."""
        back = [proof for proof in self._proofs if set(proof.link.names) & set(nodes)]
        self._proofs = [proof for proof in self._proofs if proof not in back]
        await asyncio.gather(*(proof.link.close() for proof in back))

    async def close(self) -> None:
        kept, self._proofs = self._proofs, []
        await asyncio.gather(*(proof.link.close() for proof in kept))
