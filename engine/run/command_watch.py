"""Watches the ranks of a command, which reports little by itself: by what they print and by what their keepers see of
their processes (engine.node.rank_activity). So hangs are found, and ranks that train apart from one another.

No rank has to print. That one is silent says something only where it printed again and again, and does not work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.models import RecoveryConfig
from engine.node.rank_activity import REPEAT_S
from engine.run.events import Hang, Resumed
from engine.run.observation import CommandView

RANKS_APART = "RANKS_APART"
STOPPED, IDLE = "stopped", "idle"
_TIMES = 5.0
_CONFIRMED_S = 4 * REPEAT_S
_PERIODIC = 5
"""Seconds with output, from which on a rank prints again and again."""
APART_S = 15.0
"""From the first sign that ranks train apart from one another to the alarm."""
APART_FIX = "remove the launcher (torchrun, mlx.launch …) from what the command starts: Flight Deck starts the ranks"
_UNJOINED = (
    "it makes steps, and no rank has connected to another: if they are to train together, the program must join the "
    "group that its variables (RANK, WORLD_SIZE, MASTER_ADDR …, or MLX's) describe"
)


@dataclass
class RankSigns:
    """One rank's signs of life. Times are in seconds in which its node answered."""

    state: str = "busy"
    state_s: float = 0.0
    confirmed_s: float = 0.0
    """Since its keeper last reported the state: on a full disk it cannot."""
    printed: int = 0
    """Bytes."""
    silent_s: float = 0.0
    longest_s: float = 0.0
    """Its longest silence between two outputs."""
    outputs: int = 0
    """Seconds in which it printed something, the last of them `printed_in`."""
    printed_in: int | None = None
    joined: bool | None = None
    """Connected to another rank; None: not known."""
    own_rank: int | None = None
    """The rank that one of its processes has in another group."""

    def advance(self, elapsed: float, printed: int, second: int) -> None:
        """Its log has `printed` bytes in this second of the clock."""
        self.state_s, self.confirmed_s, self.silent_s = (
            seconds + elapsed for seconds in (self.state_s, self.confirmed_s, self.silent_s)
        )
        if printed > self.printed:
            self.longest_s = max(self.longest_s, self.silent_s if self.outputs else 0.0)
            self.outputs += second != self.printed_in
            self.printed, self.printed_in, self.silent_s = printed, second, 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        """A `processes` or `group` event."""
        if (state := event.get("state")) in ("busy", IDLE, STOPPED):
            self.state_s = self.state_s if state == self.state else 0.0
            self.state, self.confirmed_s = str(state), 0.0
        if isinstance(joined := event.get("joined"), bool):
            self.joined = joined
        if type(own_rank := event.get("own_rank")) is int:
            self.own_rank = own_rank

    @property
    def still_s(self) -> float:
        """For how long it has neither printed anything nor worked."""
        reported = self.state != "busy" and self.confirmed_s < _CONFIRMED_S
        return min(self.silent_s, self.state_s) if reported else 0.0


class CommandWatch:
    """The ranks of one attempt. Call `observe` at every tick."""

    def __init__(self, ranks: int, recovery: RecoveryConfig, *, waits_busily: bool) -> None:
        """`waits_busily`: a rank that waits for another one uses the CPU meanwhile, as in MLX."""
        self.ranks = {rank: RankSigns() for rank in range(ranks)}
        self._hang_s, self._stall_s = recovery.hang_s, recovery.stall_s
        self._waits_busily = waits_busily
        self._at: float | None = None
        self._apart_s = self._unjoined_s = 0.0

    @property
    def outputs(self) -> int:
        """Seconds in which the rank that printed in the most of them did."""
        return max((signs.outputs for signs in self.ranks.values()), default=0)

    @property
    def apart(self) -> tuple[int, ...]:
        """The ranks of which processes have the same rank, each in a group of its own; none once any rank was seen in
        the group that it was started for."""
        own_ranks = {rank: signs.own_rank for rank, signs in self.ranks.items() if signs.own_rank is not None}
        count = Counter(own_ranks.values())
        joined = any(signs.joined for signs in self.ranks.values())
        return () if joined else tuple(rank for rank, number in own_ranks.items() if count[number] > 1)

    def observe(self, now: float, printed: Mapping[int, int], *, stepped: bool) -> None:
        """`printed`: bytes of the ranks whose nodes answer. `stepped`: the program has reported a step."""
        elapsed, self._at = now - (self._at if self._at is not None else now), now
        for rank, size in printed.items():
            self.ranks[rank].advance(elapsed, size, int(now))
        signs = self.ranks.values()
        unjoined = {rank_signs.joined for rank_signs in signs} in ({False}, {False, None})
        elsewhere = any(rank_signs.own_rank is not None for rank_signs in signs)
        self._apart_s = self._apart_s + elapsed if self.apart else 0.0
        self._unjoined_s = self._unjoined_s + elapsed if stepped and unjoined and not elsewhere else 0.0

    def view(
        self, running: Collection[int], iteration: int, *, stepped: bool, resumption: Resumed | None
    ) -> CommandView:
        """`running`: the ranks that have not ended. `iteration`: the last one that any rank finished."""
        return CommandView(
            outputs=self.outputs,
            apart=self.apart,
            trains_apart=self.trains_apart(stepped=stepped),
            alarm=self.alarm(),
            hang=self.hang(running, iteration),
            resumption=resumption,
        )

    def alarm(self) -> str | None:
        """The fault of the ranks' group, in one line; None for none."""
        if self._apart_s > APART_S:
            return f"{apart_cause(self.apart)}: {APART_FIX}"
        return _UNJOINED if self._unjoined_s > APART_S else None

    def trains_apart(self, *, stepped: bool) -> bool:
        """They do not only prepare something by themselves: it has made a step, or goes on for long."""
        return self._apart_s > (APART_S if stepped else max(APART_S, self._stall_s))

    def hang(self, running: Collection[int], iteration: int) -> Hang | None:
        """`running`: the ranks that have not ended."""
        ranks = {rank: signs for rank, signs in self.ranks.items() if rank in running}
        rank = max(ranks, key=lambda number: (ranks[number].state == STOPPED, ranks[number].still_s), default=0)
        if ranks and ranks[rank].state == STOPPED and ranks[rank].still_s > self._hang_s:
            return Hang(ranks[rank].still_s, self._hang_s, STOPPED, iteration, rank)
        for rank, signs in ranks.items():
            limit = max(self._stall_s, _TIMES * signs.longest_s)
            beside = any(other.silent_s < limit for number, other in ranks.items() if number != rank)
            # Where all but rank 0 are idle, they may wait for what it alone prepares, and prints.
            others = [other.state for number, other in ranks.items() if number not in (0, rank)]
            beside = beside and (rank == 0 or self._waits_busily or "busy" in others)
            if signs.outputs >= _PERIODIC and signs.still_s > limit and beside:
                return Hang(signs.still_s, limit, IDLE, iteration, rank)
        return self._all_silent(ranks, iteration)

    def _all_silent(self, ranks: Mapping[int, RankSigns], iteration: int) -> Hang | None:
        limit = max([self._stall_s, *(_TIMES * signs.longest_s for signs in ranks.values())])
        if not ranks or self.outputs < _PERIODIC or any(signs.silent_s <= limit for signs in ranks.values()):
            return None
        still = {rank: signs.still_s for rank, signs in ranks.items() if signs.still_s > limit}
        if len(still) == len(ranks):
            return Hang(min(still.values()), limit, IDLE, iteration)
        # While rank 0 alone saves or validates, the others may wait for it without work.
        single = len(still) == 1 and (len(ranks) > 2 or 0 in still or self._waits_busily)
        return Hang(max(still.values()), limit, IDLE, iteration, max(still)) if single else None


def apart_cause(ranks: tuple[int, ...]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"ranks {numbers} each train a copy by themselves, in a group of their own that the command has started"
