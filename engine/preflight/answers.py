"""What the looks of engine.worker.looks say, as the head takes it: of a known form, bounded, and safe to show.

A node may be anybody's, and a file name on it anything: nothing of an answer is used before it has this form.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from engine.security.sanitise import plain


def _short(text: str) -> str:
    return plain(text, 300)


Words = Annotated[str, AfterValidator(_short)]
Count = Annotated[int, Field(ge=0)]
Pid = Annotated[int, Field(gt=1)]


class Answer(BaseModel):
    """One look's JSON object."""

    model_config = ConfigDict(frozen=True)


class Model(Answer):
    """Of worker.looks.model."""

    kind: Words
    """model_type of config.json."""
    bytes: Count
    shards: Count
    faults: Annotated[list[Words], Field(max_length=100)]
    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")] | None = None
    """Where config.json says that it came from, as ORG/NAME."""
    hashes: Annotated[dict[Words, Words], Field(max_length=10_000)]
    """File → SHA-256, of weights their size."""

    def words(self) -> str:
        if self.faults:
            return "; ".join(self.faults)
        return f"{self.kind}, {self.shards} shard{'s' * (self.shards != 1)}, {self.bytes / 1e6:,.1f} MB"


class JsonlFile(Answer):
    """What worker.looks.jsonl has read in one file, or why it could not."""

    lines: Count = 0
    examples: Count = 0
    sha256: Words = ""
    form: Words | None = None
    faults: Annotated[list[tuple[Annotated[int, Field(gt=0)], Words]], Field(max_length=100)] = []
    """(line number from 1, what is wrong with it), the first of them."""
    fault_count: Count = 0
    problem: Words | None = None
    absent: bool = False


class Jsonl(Answer):
    """Of worker.looks.jsonl."""

    files: Annotated[list[JsonlFile], Field(max_length=10)]
    """In the order in which they were asked for."""


class Program(Answer):
    """Of worker.looks.program."""

    program: Words | None
    """What would be run."""
    script: Annotated[str, Field(max_length=4096)] | None = None
    """Where its Python script lies, symlinks followed."""
    roots: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=10)] = []
    """The node's home and its workdir, likewise."""
    fault: Words | None
    make: Annotated[str, Field(max_length=4096)] | None = None
    """A folder that is missing."""
    permit: Annotated[str, Field(max_length=4096)] | None = None
    """A file that may not be executed."""


class Holder(Answer):
    """Who holds a port."""

    holder: Words
    pid: Pid | None = None
    orphan: bool = False
    """It is of a Flight Deck run."""


class Ports(Answer):
    """Of worker.looks.ports."""

    ports: Annotated[list[Holder | None], Field(max_length=10_000)]
    """In the order in which they were asked for; None is free."""


class Problems(Answer):
    """Of worker.looks.addresses, own and reach."""

    problems: Annotated[list[Words | None], Field(max_length=10_000)]
    """In the order in which they were asked for; None is none."""


class Listening(Answer):
    """Of worker.looks.addresses, listen."""

    listening: Annotated[list[Annotated[int, Field(gt=0, lt=65_536)]], Field(max_length=10_000)]
    """The port on each address, in the order in which they were asked for."""


class StaleGroup(Answer):
    """Processes of one earlier attempt that nobody watches any more."""

    pids: Annotated[list[Pid], Field(min_length=1, max_length=10_000)]
    command: Words
    """Of the first."""


class Stale(Answer):
    """Of worker.looks.stale."""

    stale: Annotated[list[StaleGroup], Field(max_length=1_000)]


class Held(Answer):
    """Of worker.looks.lease, when it begins."""

    held: Literal[True]


class Left(Answer):
    """Of worker.looks.lease, when it is given back."""

    left: Annotated[list[Words], Field(max_length=1_000)]
    """Commands of what outlived every KILL."""


class Tree(Answer):
    """Of worker.looks.tree."""

    home: bool = False
    problem: Words | None = None
    absent: bool = False
    permit: Annotated[str, Field(max_length=4096)] | None = None
    """What may not be read."""
    cut: bool = False
    left: Annotated[list[Words], Field(max_length=10_000)] = []
    """Folders that were left out for what they are: environments, and what the question set apart."""
    entries: Annotated[dict[Words, tuple[Annotated[int, Field(ge=-1)], Words | None]], Field(max_length=100_000)] = {}
    """Path → (size, SHA-256 or None); of a symlink (-1, its target)."""


class Hashes(Answer):
    """Of worker.looks.consistency."""

    hashes: Annotated[dict[Words, Words | None], Field(max_length=10_000)]
    """Name → SHA-256; None where there is no such file."""


class Configuration(Answer):
    """Of worker.looks.configuration: its figures are used, its words are never shown."""

    configuration: Annotated[dict[str, Any], Field(max_length=1_000)] | None = None
    problem: Words | None = None


class Examples(Answer):
    """Of worker.looks.examples."""

    examples: Count | None = None
    problem: Words | None = None


class Busy(Answer):
    """A process that works its node hard."""

    pid: Pid
    command: Words
    cores: Annotated[float, Field(ge=0, le=100_000)]
    """How many it keeps busy."""
    rss_bytes: Count
    run: bool = False
    """It belongs to a Flight Deck run."""
    ours: bool = False
    """It is of the node's own user."""


class Load(Answer):
    """Of worker.looks.load; the texts are the system's own."""

    processes: Annotated[list[Busy], Field(max_length=100)]
    memory_bytes: Count = 0
    nvidia: Annotated[str, Field(max_length=100_000)] = ""
    ioreg: Annotated[str, Field(max_length=100_000)] = ""
    assertions: Annotated[str, Field(max_length=1_000_000)] = ""
    caffeinate: bool | None = None
    """None where there is no such thing."""


class Weights(Answer):
    """What a file of trained weights would continue."""

    kind: Literal["lora", "dora", "full"]
    ranks: Annotated[list[Count], Field(max_length=10_000)] = []
    layers: Annotated[list[Count], Field(max_length=100_000)] = []
    modules: Annotated[list[Words], Field(max_length=10_000)] = []


class Storage(Answer):
    """Of worker.looks.storage."""

    directory: Words
    fault: Words | None
    make: Annotated[str, Field(max_length=4096)] | None = None
    permit: Annotated[str, Field(max_length=4096)] | None = None
    own: Annotated[str, Field(max_length=4096)] | None = None
    """A folder of another user's."""
    free: Count | None = None
    damaged: Annotated[list[tuple[Annotated[str, Field(max_length=4096)], Words]], Field(max_length=1_000)] = []
    """(file, what is wrong with it)."""
    resume: Weights | None = None
    resume_fault: Words | None = None
    largest: Annotated[list[tuple[Words, Count]], Field(max_length=100)] = []
    """(folder of an earlier run, bytes)."""
