"""An attempt's logs and events on the head: copied from its nodes while it lives, to the last byte after its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.mirror import Gap, Mirror
from engine.runs.plan_file import Plan
from engine.supervision.attempt import Attempt
from engine.supervision.links.base import NodeLink
from engine.supervision.links.links import Links

_LATE_BYTES_S = 10.0
"""The end of a log may take as long to come, after the last byte that came."""
_LOOK_EVERY_S = 0.025


class Copies:
    """Of one attempt. Not for the event loop: every call may wait for the head's disk."""

    def __init__(
        self, run_dir: RunDir, plan: Plan, attempt: Attempt, links: Links, on_gap: Callable[[Gap], None]
    ) -> None:
        """`on_gap` is told of what the head could not keep."""
        self._mirror = Mirror(run_dir, on_gap=on_gap)
        self._closed = False
        for number in (rank.rank for rank in plan.ranks):
            link, names = links.to(number), attempt.files(plan.run_id, number)
            log, events = link.file(names.log(number).name), link.file(names.events(number).name)
            self._mirror.follow(number, attempt.number, log, attempt.log_bases[number])
            self._mirror.follow_events(number, attempt.number, events, attempt.event_bases[number])
        self._mirror.follow(LAUNCHER_SOURCE, attempt.number, None, attempt.log_bases[LAUNCHER_SOURCE])

    def pump(self) -> int:
        """Copy what there is; how many bytes. 0 once they are closed: the next attempt writes the same files."""
        return 0 if self._closed else self._mirror.pump()

    def settle(self) -> list[str]:
        """Check everything once more; the files of which something is missing."""
        self._mirror.settle()
        return self._mirror.behind()

    def owed_by(self, *links: NodeLink) -> bool:
        """Whether these nodes have not sent all of their files yet."""
        theirs = tuple(f"rank{rank}." for link in links for rank in link.ranks)
        return any(name.startswith(theirs) for name in self._mirror.behind())

    def await_the_rest(self, links: Sequence[NodeLink]) -> None:
        """What these nodes have not sent yet, as long as it comes."""
        moved_at = time.monotonic()
        while not self._closed and self.owed_by(*links):
            if self.pump():
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > _LATE_BYTES_S:
                return
            else:
                time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Nothing more is copied."""
        if not self._closed:
            self._closed = True
            self._mirror.finish()
