"""The files of a queue, `<home>/queue/`: its items, and the configuration of each that has not started, 0600, since it
has the job's environment. Whoever changes the items holds a lock meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from engine.config.models import Config
from engine.errors import InputError, StateError
from engine.node.bootstrap import make_private
from engine.protocol.attempt import read_regular, sync_folder, write_atomic
from engine.queue.items import Queue
from engine.store.storage import write_lock


class QueueFiles:
    def __init__(self, home: Path) -> None:
        self.folder = home / "queue"
        self.items = self.folder / "items.json"
        self.runner = self.folder / "runner.json"
        """The process that has its items started."""
        self.notes = self.folder / "notes.json"
        """Item → why it does not start, as that process has noticed."""
        self.runner_lock = self.folder / "runner.lock"
        self.runner_log = self.folder / "runner.log"

    def read(self) -> Queue:
        """As it is now. Raises StateError."""
        try:
            return Queue.model_validate_json(read_regular(self.items))
        except FileNotFoundError:
            return Queue()
        except (OSError, ValidationError) as error:
            todo = "move that file away to begin with an empty queue: runs go on"
            raise StateError("the queue is not read", where=str(self.items), why=str(error), todo=todo) from error

    def change(self, make: Callable[[Queue], Queue], then: Callable[[], None] = lambda: None) -> Queue:
        """Put what `make` makes of the queue in its place, and with the lock still held do what comes `then`; on the
        disk when this returns. Raises what `make` raises, StateError."""
        try:
            make_private(self.folder)
            with write_lock(self.folder / "write.lock"):
                before = self.read()
                if (queue := make(before)) != before:
                    write_atomic(self.items, queue.model_dump_json())
                    sync_folder(self.folder)
                then()
                return queue
        except OSError as error:
            raise StateError("the queue is not changed", where=str(self.folder), why=error) from error

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


def queued_configs(home: Path) -> dict[int, Config]:
    """Item that has not started → its configuration: what it uses is in use. Raises StateError, InputError."""
    files = QueueFiles(home)
    items = [item.id for item in files.read().items if item.state in ("waiting", "held", "launching")]
    return {item: config for item in items if (config := files.config(item)) is not None}
