"""The state on disk: run records, the last facts of each node, calibrations and scalings, as TinyDB tables in
`<home>/state.json`.

Readers take no lock and change nothing, since the file is replaced as a whole. A change is a short lock, read,
modify, atomic write. A damaged file is set aside by the next writer and the previous copy is used, as `notices` then
reports."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from tinydb import TinyDB
from tinydb.middlewares import CachingMiddleware
from tinydb.table import Document, Table

from engine.errors import StateError
from engine.measurements import Calibration, Scaling
from engine.models import NodeFacts, RunRecord
from engine.security.audit import audit_log
from engine.security.identifiers import safe_repr
from engine.security.paths import make_home
from engine.store.storage import WAIT_S, AtomicStorage, write_lock

_Answer = TypeVar("_Answer")
_Model = TypeVar("_Model", bound=BaseModel)
FACTS_LIMIT = 128
"""Nodes whose facts are kept, the last probed ones, since every change writes the whole file."""
CALIBRATIONS_LIMIT = 64
"""Calibrations kept, the newest ones; and as many scalings."""


class _Kind(NamedTuple):
    table: str
    name: str
    """The field that names an entry."""
    left_out: str
    """The notice of an entry, by its name, that cannot be read."""
    limit: int | None = None
    age: str = ""
    """The field by which the oldest are known."""


_KINDS: Final[Mapping[type[BaseModel], _Kind]] = {
    RunRecord: _Kind("runs", "id", "the record of run {} is left out"),
    NodeFacts: _Kind("facts", "node", "facts of node {} are left out", FACTS_LIMIT, "probed_at"),
    Calibration: _Kind("calibrations", "job", "a calibration of job {} is left out", CALIBRATIONS_LIMIT, "taken_at"),
    Scaling: _Kind("scalings", "job", "a scaling of job {} is left out", CALIBRATIONS_LIMIT, "taken_at"),
}


_ANNOTATIONS: Final = "annotations"
"""The table of what a person has written about runs, by the run's id."""


class _RunsRead(NamedTuple):
    identity: tuple[int, int, int]
    fields: dict[str, Mapping[str, Any]]
    """By id; the same object as in the reading before where the record is the same."""
    valid: dict[str, tuple[Mapping[str, Any], RunRecord]]
    """Those that were checked, with the fields that they were made of."""


_READ: Final[dict[Path, _RunsRead]] = {}
"""The stored runs of the file that was read last: a command asks for them several times, and the console every second,
of thousands of which one has changed."""


class _Table(Table):
    """Run id → record, cluster/node → facts, or cluster/fingerprint → calibration or scaling."""

    document_id_class = str  # type: ignore[assignment]


_Tables = Callable[[str], Table]
"""The table of a name."""


class Store:
    """Cheap to construct: reads and creates nothing until it is used. Any number may be open at once."""

    def __init__(self, home: Path, *, wait_s: float = WAIT_S, sleep: Callable[[float], object] = time.sleep) -> None:
        """`wait_s` is how long a writer waits for another."""
        self._home = home
        self._path = home / "state.json"
        self._wait_s = wait_s
        self._sleep = sleep
        self.notices: list[str] = []
        """One line about each damage found and what was done about it. What is lost then, at least the last change, is
        in the runs' journals: replay them and `rebuild`."""

    def runs(self) -> list[RunRecord]:
        """Every record, newest first; [] when nothing was ever stored. Raises StateError."""
        return self.valid_runs(self.run_fields().values())

    def run_fields(self) -> dict[str, Mapping[str, Any]]:
        """The records by id as they are stored, unchecked: to choose among thousands. Raises StateError."""
        kind, file, reported = _KINDS[RunRecord], self._identity(), len(self.notices)
        cached = _READ.get(self._path)
        if cached is not None and cached.identity == file:
            return cached.fields
        # Not by TinyDB, which makes a Document of each.
        tables = AtomicStorage(self._path, self.notices.append).read() or {}
        written, fields = tables.get(_ANNOTATIONS, {}), dict[str, Mapping[str, Any]]()
        for row in tables.get(kind.table, {}).values():
            run = str(row.get(kind.name))
            row = {**row, **written[run]} if run in written else row
            before = cached.fields.get(run) if cached is not None else None
            fields[run] = before if before is not None and before == row else row
        if file is not None and len(self.notices) == reported:
            _READ[self._path] = _RunsRead(file, fields, cached.valid if cached is not None else {})
        return fields

    def _identity(self) -> tuple[int, int, int] | None:
        """Another one after each change, which replaces the file."""
        with contextlib.suppress(OSError):
            status = self._path.stat()
            return status.st_ino, status.st_mtime_ns, status.st_size
        return None

    def valid_runs(self, fields: Iterable[Mapping[str, Any]]) -> list[RunRecord]:
        """The valid ones among stored records, newest first."""
        records, cached = list[RunRecord](), _READ.get(self._path)
        checked = cached.valid if cached is not None else {}
        for row in fields:
            run = str(row.get("id"))
            if (seen := checked.get(run)) is not None and seen[0] is row:
                records.append(seen[1])
            elif valid := self._valid(RunRecord, (row,)):
                records += valid
                checked[run] = row, valid[0]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    def put_run(self, record: RunRecord) -> None:
        """Insert the record, or replace the one with its id; on the disk when this returns. Raises StateError when
        another writer holds the lock for too long or the disk refuses; the state is unchanged then."""
        self.rebuild([record])

    def rebuild(self, records: Iterable[RunRecord]) -> None:
        """Put all `records`, from the journals, in one change. Records of other runs stay. Raises StateError."""
        # What a person has written is in a table of its own: a supervisor does not know it.
        written = {"tags", "note"}
        self._put(RunRecord, {record.id: record.model_dump(mode="json", exclude=written) for record in records})

    def annotate(
        self, run: str, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None
    ) -> dict[str, Any]:
        """Add and remove tags of a run, and replace its note ("" removes it, None leaves it): its `tags` and `note`
        then. Others may write them at the same time. Raises StateError."""
        written = dict[str, Any]()

        def write(tables: _Tables) -> None:
            rows = tables(_ANNOTATIONS)
            before = rows.get(doc_id=run) or {}  # type: ignore[call-overload]
            written["tags"] = sorted({*before.get("tags", ()), *add} - set(remove))
            written["note"] = before.get("note") if note is None else note or None
            if before:
                rows.remove(doc_ids=[run])  # type: ignore[list-item]
            if any(written.values()):
                rows.insert(Document(dict(written), doc_id=run))  # type: ignore[arg-type]

        self._change(write)
        return written

    def delete_run(self, run: str) -> None:
        """Remove the record and what a person has written about it. Raises StateError."""

        def delete(tables: _Tables) -> None:
            for name in (_KINDS[RunRecord].table, _ANNOTATIONS):
                if (rows := tables(name)).contains(doc_id=run):  # type: ignore[arg-type]
                    rows.remove(doc_ids=[run])  # type: ignore[list-item]

        self._change(delete)

    def last_facts(self, cluster: str) -> list[NodeFacts]:
        """The last known facts of this cluster's nodes, however old. Raises StateError."""
        return self._all(NodeFacts, cluster)

    def put_facts(self, cluster: str, facts: Iterable[NodeFacts]) -> None:
        """Replace the stored facts of the nodes that answered; those of the others stay. Raises StateError."""
        seen = {
            f"{cluster}/{fact.node}": fact.model_dump(mode="json", exclude_defaults=True) | {"cluster": cluster}
            for fact in facts
            if fact.problem is None
        }
        if seen:
            self._put(NodeFacts, seen)

    def calibrations(self, cluster: str) -> list[Calibration]:
        """All calibrations of this cluster, whatever the job and the state of its nodes, newest first. Raises
        StateError."""
        return sorted(self._all(Calibration, cluster), key=lambda taken: taken.taken_at, reverse=True)

    def put_calibration(self, calibration: Calibration) -> None:
        """Replaces one of the same cluster and fingerprint. Raises StateError."""
        key = f"{calibration.cluster}/{calibration.fingerprint}"
        self._put(Calibration, {key: calibration.model_dump(mode="json", exclude_defaults=True)})

    def scalings(self, cluster: str) -> list[Scaling]:
        """All scalings of this cluster. Raises StateError."""
        return self._all(Scaling, cluster)

    def put_scaling(self, scaling: Scaling) -> None:
        """Replaces one of the same cluster, fingerprint and kind (strong or weak). Raises StateError."""
        key = f"{scaling.cluster}/{scaling.fingerprint}/{'weak' if scaling.per_rank_batch else 'strong'}"
        self._put(Scaling, {key: scaling.model_dump(mode="json", exclude_defaults=True)})

    def _all(self, model: type[_Model], cluster: str) -> list[_Model]:
        """All valid entries of a cluster."""
        rows = self._transaction(lambda tables: tables(_KINDS[model].table).all())
        return self._valid(model, (row for row in rows if row.get("cluster") == cluster))

    def _valid(self, model: type[_Model], documents: Iterable[Mapping[str, Any]]) -> list[_Model]:
        kind = _KINDS[model]
        models: list[_Model] = []
        for document in documents:
            try:
                models.append(model.model_validate(document))
            except ValidationError as error:
                why = safe_repr(str(error.errors()[0]["msg"]))
                left_out = kind.left_out.format(safe_repr(document.get(kind.name)))
                self.notices.append(f"{self._path}: {left_out}: {why}")
        return models

    def _put(self, model: type[BaseModel], documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Insert or replace by id, in one change; above the kind's limit the oldest are dropped."""
        kind = _KINDS[model]
        whole = [Document(dict(values), doc_id=name) for name, values in documents.items()]  # type: ignore[arg-type]

        def put(tables: _Tables) -> None:
            rows = tables(kind.table)
            # TinyDB's upsert merges: a field that is null again would keep its old value.
            if replaced := [document.doc_id for document in whole if rows.contains(doc_id=document.doc_id)]:
                rows.remove(doc_ids=replaced)
            rows.insert_multiple(whole)
            if kind.limit is not None and len(rows) > kind.limit:
                oldest = sorted(rows.all(), key=lambda document: str(document.get(kind.age)))
                rows.remove(doc_ids=[document.doc_id for document in oldest[: len(rows) - kind.limit]])

        self._change(put)

    def _change(self, change: Callable[[_Tables], None]) -> None:
        """One change, on the disk when this returns. Raises StateError."""
        make_home(self._home)
        with write_lock(self._home / "state.lock", self._wait_s, self._sleep):
            reported = len(self.notices)
            try:
                self._transaction(change)
            except OSError as error:
                todo = "make room on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
                raise StateError("the state cannot be written", where=str(self._path), why=error, todo=todo) from error
        if self.notices[reported:]:
            audit_log("state", "damaged", {"notices": self.notices[reported:]}, home=self._home)

    def _transaction(self, action: Callable[[_Tables], _Answer]) -> _Answer:
        """One read, and one write at the end when the action has changed something. Nothing is cached between
        transactions, as another process may write in between."""
        storage = CachingMiddleware(AtomicStorage)  # type: ignore[no-untyped-call]
        with TinyDB(self._path, self.notices.append, storage=storage) as database:
            return action(lambda name: _Table(database.storage, name, cache_size=0))
