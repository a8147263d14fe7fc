"""The files of a queue, `<home>/queue/`: its journal, a line an event, and the configuration of each item that has not
started, 0600, since it has the job's environment. Whoever writes the journal holds a lock meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from engine.config.models import Config
from engine.errors import InputError, StateError
from engine.node.bootstrap import make_private
from engine.protocol.attempt import read_regular, write_atomic
from engine.queue.items import EVENT, Queue, QueueEvent, fold
from engine.run.json_lines import LineFile, LineTail
from engine.store.storage import write_lock


class QueueFiles:
    def __init__(self, home: Path) -> None:
        self.folder = home / "queue"
        self.journal = self.folder / "journal.jsonl"
        self.runner = self.folder / "runner.json"
        """The process that has its items started."""
        self.notes = self.folder / "notes.json"
        """Item → why it does not start, as that process has noticed."""
        self.runner_lock = self.folder / "runner.lock"
        self.runner_log = self.folder / "runner.log"
        self._tail, self._queue, self._reading = LineTail(self.journal), Queue(), threading.Lock()

    def read(self) -> Queue:
        """As it is now. Raises StateError."""
        # The console reads it in one thread and changes it in another: no line may be folded into an older queue.
        with self._reading:
            self._queue = fold(self._queue, self._new_events())
            return self._queue

    def _new_events(self) -> Iterator[QueueEvent]:
        for line in self._tail.lines():
            with contextlib.suppress(ValidationError):
                yield EVENT.validate_json(line)

    def change(self, make: Callable[[Queue], QueueEvent | None]) -> Queue:
        """Append the event that `make` makes of the queue as it is, if any; on the disk when this returns. Raises
        InputError where it may not come, StateError."""
        try:
            make_private(self.folder)
            with write_lock(self.folder / "write.lock"):
                queue = self.read()
                if (event := make(queue)) is not None:
                    queue.check(event)
                    with contextlib.closing(LineFile(self.journal)) as file:
                        file.append(event.model_dump_json(exclude_none=True).encode(), sync=True)
                        if file.waits:
                            raise StateError("the queue is not changed", where=str(self.folder), why="the disk is full")
        except OSError as error:
            raise StateError("the queue is not changed", where=str(self.folder), why=error) from error
        return self.read()

    def config_file(self, item: int) -> Path:
        return self.folder / f"{item}.json"

    def put_config(self, item: int, config: Config) -> None:
        """Raises OSError."""
        write_atomic(self.config_file(item), config.model_dump_json())

    def config(self, item: int) -> Config | None:
        """None once its run is made. Raises StateError, InputError for one that is damaged."""
        file = self.config_file(item)
        try:
            return Config.model_validate_json(read_regular(file))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError("the configuration is not read", where=str(file), why=error) from error
        except ValidationError as error:
            why = str(error.errors()[0]["msg"])
            raise InputError("the configuration is damaged", where=str(file), why=why) from error


def queued_configs(home: Path) -> list[Config]:
    """The configurations of all items that have not started: what they use is in use. Raises StateError, InputError."""
    files = QueueFiles(home)
    configs = (files.config(item.id) for item in files.read().items if item.state in ("waiting", "held", "launching"))
    return [config for config in configs if config is not None]
