"""The state on disk: run records, the last facts of each node and calibrations, as three TinyDB tables in
`<home>/state.json`.

Readers take no lock and change nothing, since the file is replaced as a whole. A change is a short lock, read,
modify, atomic write. A damaged file is set aside by the next writer and the previous copy is used, as `notices` then
reports.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from tinydb import TinyDB
from tinydb.middlewares import CachingMiddleware
from tinydb.table import Document, Table

from engine.errors import StateError
from engine.measurements import Calibration
from engine.models import NodeFacts, RunRecord
from engine.security.audit import audit_log
from engine.security.identifiers import safe_repr
from engine.security.paths import make_home
from engine.store.storage import WAIT_S, AtomicStorage, WriteLock

_Answer = TypeVar("_Answer")
_RUNS, _FACTS, _CALIBRATIONS = "runs", "facts", "calibrations"
FACTS_LIMIT = 128
"""Nodes whose facts are kept, the last probed ones, since every change writes the whole file."""
CALIBRATIONS_LIMIT = 64
"""Calibrations kept, the newest ones."""


class _Table(Table):
    """Run id → record, cluster/node → facts, or cluster/fingerprint → calibration."""

    document_id_class = str  # type: ignore[assignment]


def _now() -> datetime:
    return datetime.now(UTC)


class Store:
    """Cheap to construct: reads and creates nothing until it is used. Any number may be open at once."""

    def __init__(
        self,
        home: Path,
        *,
        wait_s: float = WAIT_S,
        clock: Callable[[], datetime] = _now,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`wait_s` is how long a writer waits for another."""
        self._home = home
        self._path = home / "state.json"
        self._lock = WriteLock(home / "state.lock", wait_s=wait_s, sleep=sleep)
        self._clock = clock
        self.notices: list[str] = []
        """One line about each damage found and what was done about it. What is lost then, at least the last change, is
        in the runs' journals: replay them and `rebuild`."""

    def runs(self) -> list[RunRecord]:
        """Every record, newest first; [] when nothing was ever stored. Raises StateError."""
        found = self._transaction(_RUNS, lambda table: table.all())
        records = [record for document in found if (record := self._record(document)) is not None]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    def get_run(self, run_id: str) -> RunRecord | None:
        """Raises StateError."""
        found = self._transaction(_RUNS, lambda table: table.get(doc_id=cast(int, run_id)))
        return None if found is None else self._record(found)

    def put_run(self, record: RunRecord) -> None:
        """Insert the record, or replace the one with its id; on the disk when this returns. Raises StateError when
        another writer holds the lock for too long or the disk refuses; the state is unchanged then."""
        self.rebuild([record])

    def rebuild(self, records: Iterable[RunRecord]) -> None:
        """Put all `records`, from the journals, in one change. Records of other runs stay. Raises StateError."""
        self._put(_RUNS, {record.id: record.model_dump(mode="json") for record in records})

    def last_facts(self, cluster: str) -> list[NodeFacts]:
        """The last known facts of this cluster's nodes, however old. Raises StateError."""
        found = self._transaction(_FACTS, lambda table: table.all())
        return [facts for document in found if (facts := self._facts(cluster, document)) is not None]

    def put_facts(self, cluster: str, facts: Iterable[NodeFacts]) -> None:
        """Replace the stored facts of the nodes that answered; those of the others stay. Raises StateError."""
        seen = {
            f"{cluster}/{fact.node}": fact.model_dump(mode="json", exclude_defaults=True) | {"cluster": cluster}
            for fact in facts
            if fact.problem is None
        }
        if seen:
            self._put(_FACTS, seen, limit=FACTS_LIMIT, by="probed_at")

    def calibrations(self, cluster: str) -> list[Calibration]:
        """All calibrations of this cluster, whatever the job and the state of its nodes, newest first. Raises
        StateError."""
        found = self._transaction(_CALIBRATIONS, lambda table: table.all())
        known = [taken for document in found if (taken := self._calibration(cluster, document)) is not None]
        return sorted(known, key=lambda taken: taken.taken_at, reverse=True)

    def put_calibration(self, calibration: Calibration) -> None:
        """Replaces one of the same cluster and fingerprint. Raises StateError."""
        key = f"{calibration.cluster}/{calibration.fingerprint}"
        document = calibration.model_dump(mode="json", exclude_defaults=True)
        self._put(_CALIBRATIONS, {key: document}, limit=CALIBRATIONS_LIMIT, by="taken_at")

    def _put(
        self, table: str, documents: Mapping[str, Mapping[str, Any]], limit: int | None = None, by: str = ""
    ) -> None:
        """Insert or replace by id, in one change; above the limit the smallest by their field `by` are dropped."""
        whole = [Document(dict(values), doc_id=name) for name, values in documents.items()]  # type: ignore[arg-type]

        def put(rows: Table) -> None:
            # TinyDB's upsert merges: a field that is null again would keep its old value.
            if known := [document.doc_id for document in whole if rows.contains(doc_id=document.doc_id)]:
                rows.remove(doc_ids=known)
            rows.insert_multiple(whole)
            if limit is not None and len(rows) > limit:
                oldest = sorted(rows.all(), key=lambda document: str(document.get(by)))[: len(rows) - limit]
                rows.remove(doc_ids=[document.doc_id for document in oldest])

        make_home(self._home)
        with self._lock:
            reported = len(self.notices)
            try:
                self._transaction(table, put)
            except OSError as error:
                todo = "make room on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
                why = error.strerror or str(error)
                raise StateError("the state cannot be written", where=str(self._path), why=why, todo=todo) from error
        if self.notices[reported:]:
            audit_log("state", "damaged", {"notices": self.notices[reported:]}, home=self._home)

    def _transaction(self, table: str, action: Callable[[Table], _Answer]) -> _Answer:
        """One read, and one write at the end when the action has changed something. Nothing is cached between
        transactions, as another process may write in between."""
        storage = CachingMiddleware(AtomicStorage)  # type: ignore[no-untyped-call]
        with TinyDB(self._path, self.notices.append, self._clock, storage=storage) as database:
            return action(_Table(database.storage, table, cache_size=0))

    def _record(self, document: Mapping[str, Any]) -> RunRecord | None:
        try:
            return RunRecord.model_validate(document)
        except ValidationError as error:
            why = safe_repr(str(error.errors()[0]["msg"]))
            self.notices.append(f"{self._path}: the record of run {safe_repr(document.get('id'))} is left out: {why}")
            return None

    def _facts(self, cluster: str, document: Mapping[str, Any]) -> NodeFacts | None:
        if document.get("cluster") != cluster:
            return None
        try:
            return NodeFacts.model_validate(document)
        except ValidationError as error:
            why = safe_repr(str(error.errors()[0]["msg"]))
            self.notices.append(f"{self._path}: facts of node {safe_repr(document.get('node'))} are left out: {why}")
            return None

    def _calibration(self, cluster: str, document: Mapping[str, Any]) -> Calibration | None:
        if document.get("cluster") != cluster:
            return None
        try:
            return Calibration.model_validate(document)
        except ValidationError as error:
            why = safe_repr(str(error.errors()[0]["msg"]))
            self.notices.append(
                f"{self._path}: a calibration of job {safe_repr(document.get('job'))} is left out: {why}"
            )
            return None
