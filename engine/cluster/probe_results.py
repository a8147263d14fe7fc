"""Validated results of the probes of engine.node.probes, described here alone, and the one place where what a program
or probe prints becomes a value, or the reason why it is none: the caller names both the probe and its result. A node is
not trusted: no part of a report is used before it is bounded and safe to show."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, model_validator

from engine.cluster.transport.base import Completed
from engine.cluster.transport.local import LocalTransport
from engine.errors import plural, size_text
from engine.measurements import Count
from engine.models import Failed, FrozenModel, Late, NoValue, Unparsable
from engine.protocol.manifest import DATA_PREFIX, REVISION, HubName
from engine.security.redact import Redactor
from engine.security.sanitise import plain, sanitise_text

_FORMS = Redactor(environment={})
ShortText = Annotated[str, AfterValidator(lambda text: _FORMS(plain(text, 300)))]
"""Without secrets, as a process's command may have."""
PathText = Annotated[
    str, AfterValidator(lambda path: path.encode(errors="backslashreplace").decode()), Field(max_length=4096)
]
ShownText = Annotated[str, AfterValidator(lambda text: sanitise_text(text[:30_000]))]
"""With its line breaks."""
WholeText = Annotated[str, AfterValidator(lambda text: plain(text, 30_000))]
"""A path that is compared with those of other nodes: the longest one with each byte escaped is not cut."""
Pid = Annotated[int, Field(gt=1)]
VersionText = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+!_-]{0,63}$")]
"""It may become part of a command."""


class _Report(FrozenModel):
    """A report that says one of several things: without any of them it is none, and never "nothing was found"."""

    tells: ClassVar[tuple[tuple[str, ...], ...]]
    """The fields of each of these things; one is there whole."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        values = ((name, getattr(self, name)) for name in self.model_fields_set)
        empty = {name for name, value in values if value is None or value is False} - {"form", "foreign"}
        if not any(self.model_fields_set - empty >= {*names} for names in self.tells):
            raise ValueError(f"it has none of {self.tells}")
        return self


class ModelFiles(FrozenModel):
    kind: ShortText
    """model_type of config.json."""
    bytes: Count
    shards: Count
    faults: Annotated[list[ShortText], Field(max_length=100)]
    warnings: Annotated[list[ShortText], Field(max_length=100)] = Field(default_factory=list)
    doubts: Annotated[list[ShortText], Field(max_length=100)] = Field(default_factory=list)
    """Reasons to try whether it loads."""
    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")] | None = None
    """The model's origin as config.json names it, ORG/NAME."""
    hashes: Annotated[dict[ShortText, ShortText], Field(max_length=10_000)]
    """File → SHA-256, of weights their size."""
    quantized: bool = False
    """By MLX: config.json has its `quantization`."""

    def describe(self) -> str:
        if self.faults:
            return "; ".join(self.faults)
        return f"{self.kind}, {plural(self.shards, 'shard')}, {size_text(self.bytes)}"


class NodeCopy(FrozenModel):
    """One model or data set on one node."""

    kind: Literal["model", "dataset"]
    name: WholeText
    """`org/name` in the cache, else the folder's path."""
    revision: Annotated[str, Field(pattern=f"^{REVISION}$")] | None = None
    """The commit; null for a folder."""
    refs: tuple[ShortText, ...] = Field(default=(), max_length=20)
    """Branches and tags that are at it."""
    path: WholeText
    """The folder with its files."""
    bytes: Count
    files: Count
    missing: tuple[ShortText, ...] = Field(default=(), max_length=20)
    """Files that it lacks, the first of them."""
    damaged: tuple[ShortText, ...] = Field(default=(), max_length=20)
    """Files whose content is not what it should be, the first of them."""

    @property
    def label(self) -> str:
        """Its name as [job] would have it."""
        return f"{DATA_PREFIX * (self.kind == 'dataset')}{self.name}"

    @property
    def complete(self) -> bool:
        return not self.missing and not self.damaged

    @property
    def state(self) -> str:
        """ "complete", or what is wrong with it."""
        faults = ((self.missing, "missing"), (self.damaged, "damaged"))
        words = [f"{plural(len(names), 'file')} {word}: {names[0]}" for names, word in faults if names]
        return "; ".join(words) or "complete"


class NodeCopies(_Report):
    """The answer of `copies`."""

    tells = (("problem",), ("cache", "free_bytes", "copies"))

    node: str = ""
    cache: WholeText = ""
    """Its Hugging Face cache."""
    free_bytes: Count | None = None
    """On the cache's disk."""
    offline: bool = False
    """Its user has set HF_HUB_OFFLINE."""
    present: tuple[WholeText, ...] = Field(default=(), max_length=100, exclude=True)
    """Those paths of the request that are there."""
    copies: tuple[NodeCopy, ...] = Field(default=(), max_length=1001)
    problem: ShortText | None = None
    """Why it is not known what it has."""

    def best(self, wanted: HubName) -> NodeCopy | None:
        """The copy of that name: a whole one before others."""
        named = [copy for copy in self.copies if (copy.kind, copy.name) == (wanted.kind, wanted.name)]
        return next((copy for copy in named if copy.complete), named[0] if named else None)


class RemovedCopy(_Report):
    tells = (("bytes",), ("problem",))
    bytes: Count = 0
    """That were freed."""
    problem: ShortText | None = None


Lengths = Annotated[dict[Count, Count], Field(max_length=10_000)]
"""Tokens → rows, of some rows of a file."""
Tally = Annotated[dict[ShortText, tuple[Count, Count]], Field(max_length=20)]
"""A property of rows of a file → how many they are, and the first one's line; "rows": those looked at, "more":
if there are others."""


class JsonlSummary(_Report):
    """One file of `jsonl`."""

    tells = (("problem",), ("lines", "examples", "sha256", "form", "faults", "fault_count", "foreign"))

    lines: Count = 0
    examples: Count = 0
    sha256: ShortText = ""
    bytes: Count = 0
    form: ShortText | None = None
    faults: list[tuple[Annotated[int, Field(gt=0)], ShortText]] = Field(default_factory=list, max_length=100)
    """(line number from 1, what is wrong with it), the first of them."""
    fault_count: Count = 0
    problem: ShortText | None = None
    absent: bool = False
    foreign: ShortText | None = None
    """Its content, perhaps a key of engine.node.source_files.WAYS."""
    tally: Tally = Field(default_factory=dict)
    path: PathText | None = None
    """The file that was read, where it is not the one that was asked for."""


class ConversionReport(FrozenModel):
    """How data that is no standard folder was read (engine.node.standard_data)."""

    shapes: Annotated[dict[ShortText, Count], Field(max_length=10)]
    """Shape → rows."""
    counts: Annotated[dict[ShortText, Count], Field(max_length=3)]
    """train, valid, test → rows."""
    split_off: Annotated[dict[ShortText, float], Field(max_length=3)]
    """valid, test → share of the rows."""
    skipped: Annotated[dict[ShortText, tuple[Count, ShortText]], Field(max_length=10)]
    """Why → how many rows are left out, and the place of the first."""
    unread: Annotated[list[ShortText], Field(max_length=1000)]
    """Keys of rows."""
    files: Count

    def describe(self) -> str:
        shapes = ", ".join(
            f"{name} ({count:,})" if len(self.shapes) > 1 else name for name, count in self.shapes.items()
        )
        rejected = " (chosen is trained on, rejected is not)" if "preference" in self.shapes else ""
        split_off = [f"{share:.1%} split off as {name}" for name, share in self.split_off.items()]
        keys = [key or "a column without a name" for key in self.unread[:8]]
        unread = [f"not read: {', '.join(keys)}{', …' * (len(self.unread) > 8)}"] if keys else []
        return "; ".join([f"{plural(self.files, 'file')} of {shapes}{rejected}", *split_off, *unread])

    @property
    def warnings(self) -> list[str]:
        lines = [
            f"{plural(count, 'row')} left out, {why} (first: {place})" for why, (count, place) in self.skipped.items()
        ]
        empty = [name for name in self.split_off if not self.counts.get(name)]
        rows = plural(sum(self.counts.values()), "row")
        return lines + [f"no row is in {name}: {self.split_off[name]:.1%} of {rows} is none" for name in empty]


class JsonlSummaries(FrozenModel):
    files: Annotated[list[JsonlSummary], Field(max_length=10)]
    """In the order of the request."""
    conversion: ConversionReport | None = None


class RefusedRows(FrozenModel):
    """Rows of one file that are refused for the same reason."""

    file: PathText
    line: Count
    """The first of them, from 1; 0: the file as a whole."""
    count: Annotated[int, Field(gt=0)]
    why: ShortText


class TemplateReport(_Report):
    tells = (("refused",), ("problem",))
    refused: Annotated[list[RefusedRows], Field(max_length=100)] = Field(default_factory=list)
    tallies: Annotated[dict[PathText, Tally], Field(max_length=10)] = Field(default_factory=dict)
    lengths: Annotated[dict[PathText, Lengths], Field(max_length=10)] = Field(default_factory=dict)
    """By file, also those of rows that are truncated."""
    problem: ShortText | None = None
    """Why the rows were not tried."""


class ShownRow(FrozenModel):
    """A row of train.jsonl as the model sees it."""

    line: Count
    masked: ShownText
    """The beginning of its text, not trained on."""
    trained: ShownText
    tokens: Count
    targets: Count
    cut: Count
    """Tokens after max_seq_length."""


class RowsReport(_Report):
    tells = (("rows",), ("problem",))
    rows: Annotated[list[ShownRow], Field(max_length=1000)] = Field(default_factory=list)
    problem: ShortText | None = None


class LoadingReport(_Report):
    tells = (("loads",), ("problem",), ("own_code",), ("untried",))
    loads: bool = False
    own_code: bool = False
    """It comes with code of its own, without which it cannot be loaded."""
    problem: ShortText | None = None
    """Why the framework cannot load the model."""
    untried: ShortText | None = None


class RemovalReport(_Report):
    tells = (("bytes",), ("running",), ("problem",))
    bytes: Count | None = None
    """That the folders take on the disk, or took."""
    running: Annotated[list[ShortText], Field(max_length=1_000)] = Field(default_factory=list)
    """Processes of the run, because of which nothing was removed."""
    problem: ShortText | None = None


class AdapterReport(_Report):
    tells = (("names", "trained"), ("names", "problem"), ("untried",))
    names: Annotated[list[ShortText], Field(max_length=1_000)] = Field(default_factory=list)
    """Matrices of the last layer."""
    unmatched: Annotated[list[ShortText], Field(max_length=1_000)] = Field(default_factory=list)
    """Keys of lora_parameters that name nothing."""
    trained: Count = 0
    misfit: ShortText | None = None
    """Why the weights to resume from are none of the job's."""
    lacking: Count = 0
    """Trained tensors that are not among them."""
    problem: ShortText | None = None
    """Why mlx-lm cannot adapt the model."""
    untried: ShortText | None = None
    """Why it is not known."""


class ReporterState(FrozenModel):
    installed: bool
    key: bool
    """The node has an API key for it, or sends nothing."""


class Reporters(FrozenModel):
    services: Annotated[dict[ShortText, ReporterState], Field(max_length=10)]


class ProgramLocation(FrozenModel):
    program: ShortText | None
    """The program that would run."""
    launcher: tuple[ShortText, bool] | None = None
    """The sentence about a launcher in a shell script, and whether it is certain."""
    fault: ShortText | None
    make: PathText | None = None
    """A folder that is missing."""
    permit: PathText | None = None
    """A file that may not be executed."""
    absent: ShortText | None = None
    """A program that was looked for by its name."""
    locks: list[PathText] = Field(default_factory=list, max_length=100)
    """Locks of builds of torch's extensions that no process holds."""


class PortHolder(FrozenModel):
    holder: ShortText
    pid: Pid | None = None
    orphan: bool = False
    """It belongs to a Flight Deck run."""


class PortHolders(FrozenModel):
    ports: Annotated[list[PortHolder | None], Field(max_length=10_000)]
    """In the order of the request; None is free."""


class AddressProblems(FrozenModel):
    """`addresses` and `reach`."""

    problems: Annotated[list[ShortText | None], Field(max_length=10_000)]
    """In the order of the request; None where there is none."""


class ListeningPorts(FrozenModel):
    listening: Annotated[list[Annotated[int, Field(gt=0, lt=65_536)]], Field(max_length=10_000)]
    """The port on each address, in the order of the request."""


class StaleProcessGroup(FrozenModel):
    """Processes of one earlier attempt that nobody watches any more."""

    pids: Annotated[list[Pid], Field(min_length=1, max_length=10_000)]
    command: ShortText
    """The first one's."""


class StaleProcesses(FrozenModel):
    stale: Annotated[list[StaleProcessGroup], Field(max_length=1_000)]
    marked_seen: bool
    """The node finds a process by the nonce in its environment, as a proof of end does."""


class OccupiedReport(FrozenModel):
    nonces: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=1_000)]
    """Those of the attempts that have processes there, of any head."""


class LeaseHeld(FrozenModel):
    """The first document of `lease`."""

    held: Literal[True]


class LeaseReleased(FrozenModel):
    """The second document of `lease`, when it is released."""

    left: Annotated[list[ShortText], Field(max_length=1_000)]
    """Commands of what outlived every KILL."""


class WorkdirTree(_Report):
    tells = (("home",), ("problem",), ("entries", "left"))
    home: bool = False
    """The folder is the user's home, of which nothing is read."""
    problem: ShortText | None = None
    """Why it cannot be read."""
    absent: bool = False
    permit: PathText | None = None
    """Path that may not be read."""
    cut: bool = False
    """There are more entries."""
    left: list[WholeText] = Field(default_factory=list, max_length=10_000)
    """Folders that were left out for what they are: environments, and what the request set apart."""
    entries: dict[WholeText, tuple[Annotated[int, Field(ge=-1)], WholeText | None]] = Field(
        default_factory=dict, max_length=100_000
    )
    """Path → (size, SHA-256 or None); of a symlink (-1, its target)."""


class FileHashes(FrozenModel):
    hashes: Annotated[dict[ShortText, ShortText | None], Field(max_length=10_000)]
    """Name → SHA-256; None where there is no such file."""


class InputsReport(FrozenModel):
    """TrainingStarted's, as a training would begin now."""

    inputs: Annotated[dict[ShortText, ShortText], Field(max_length=100)]
    versions: Annotated[dict[ShortText, ShortText], Field(max_length=100)]


class ModelConfiguration(_Report):
    """`configuration`: its figures are used; its texts are not safe to show."""

    tells = (("configuration",), ("problem",))

    configuration: Annotated[dict[str, Any], Field(max_length=1_000)] | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    problem: ShortText | None = None


class ExampleCount(_Report):
    tells = (("examples",), ("problem",))
    examples: Count | None = None
    converted: ShortText | None = None
    problem: ShortText | None = None


class BusyProcess(FrozenModel):
    pid: Pid
    command: ShortText
    cores: Annotated[float, Field(ge=0, le=100_000)]
    """How many it keeps busy."""
    rss_bytes: Count
    run: bool = False
    """It belongs to a Flight Deck run."""


class SystemLoad(FrozenModel):
    """`load`; the texts are the system's own."""

    processes: Annotated[list[BusyProcess], Field(max_length=100)]
    memory_bytes: Count
    nvidia: Annotated[str, Field(max_length=100_000)] | None = ""
    """None where there is a GPU, and its processes are not known."""
    shm_bytes: Count | None = None
    """Size of /dev/shm, where there is one."""
    memlock_bytes: Count | None = None
    """Memory that a process may lock, where that is limited and there is InfiniBand."""
    ioreg: Annotated[str, Field(max_length=100_000)] = ""
    assertions: Annotated[str, Field(max_length=1_000_000)] = ""
    energy: Annotated[str, Field(max_length=100_000)] = ""
    caffeinate: bool | None = None
    """None where there is no such thing."""


class AdapterWeights(FrozenModel):
    """The kind of training that a file of trained weights continues."""

    kind: Literal["lora", "dora", "full"]
    peft: bool = False
    """An adapter of peft, with other names than mlx-lm's."""
    ranks: Annotated[list[Count], Field(max_length=10_000)]
    layers: Annotated[list[Count], Field(max_length=100_000)]
    modules: Annotated[list[ShortText], Field(max_length=10_000)]


class CheckpointStorage(FrozenModel):
    directory: ShortText
    """Resolved."""
    fault: ShortText | None
    make: PathText | None = None
    permit: PathText | None = None
    """Folders that are missing, and that may not be written or entered."""
    own: PathText | None = None
    """A folder of another user's."""
    not_durable: ShortText | None
    """A folder where what was saved last may be lost with the power."""
    free: Count | None = None
    damaged: Annotated[list[tuple[PathText, ShortText]], Field(max_length=1_000)]
    """(file, what is wrong with it)."""
    resume: AdapterWeights | None
    resume_fault: ShortText | None
    largest: list[tuple[ShortText, Count]] = Field(default_factory=list, max_length=100)
    """(folder of an earlier run, bytes), where less is free than is needed."""


class FreePorts(FrozenModel):
    free: list[int]


class WriteReport(FrozenModel):
    problem: ShortText | None


class TorchBuild(FrozenModel):
    """The build of one python's torch, and the GPUs that it can use."""

    cuda: Annotated[str, Field(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){0,3}$")] | None
    """The version that it was built with; None for a build without CUDA."""
    nccl: ShortText | None
    gpus: Annotated[int, Field(ge=0, le=1024)]
    cuda_problem: ShortText | None
    """PyTorch's warning where it can use none."""
    nvidia_smi: Annotated[str, Field(max_length=2_000)] | None
    """The first lines of what it prints; None without it. Not safe to show."""


class PackagesReport(FrozenModel):
    """`mlx`, `mlx_lm` and `torch`."""

    python: VersionText
    linux: bool
    venv: bool
    versions: Annotated[dict[ShortText, VersionText], Field(max_length=20)]
    """By package, of those that were found or imported."""
    errors: Annotated[dict[ShortText, ShortText], Field(max_length=20)]
    """Why the others were not."""
    backends: Annotated[list[ShortText], Field(max_length=8)]
    """The distributed ones of MLX or torch; none where it was not imported."""
    builds: Annotated[dict[ShortText, VersionText], Field(max_length=20)] = Field(default_factory=dict)
    """MLX's on Linux: by package, of engine.node.probes.imports.MLX_BUILDS."""
    build: TorchBuild | None = None
    """None where torch was not imported."""


_SHOWN = 200
Value = TypeVar("Value", bound=BaseModel)


def parse_output(command: str, done: Completed, value_type: type[Value], *, after_s: float) -> Value | NoValue:
    """The last line of stdout that is a `value_type` as JSON: a login shell may print around it. `command` is named in
    the reason why there is none; its time limit was `after_s` seconds."""
    value = last_json(done.stdout, value_type)
    if value is not None:
        return value
    if done.code is None:
        return Late(command=command, after_s=after_s)
    if done.code:
        return Failed(command=command, exit_code=done.code, stderr=plain(done.exit_output, _SHOWN))
    return Unparsable(command=command, output=plain(done.exit_output, _SHOWN))


def last_json(output: bytes, value_type: type[Value]) -> Value | None:
    """The last line that is a `value_type`."""
    values = (parse_line(line, value_type) for line in reversed(output.splitlines()))
    return next((value for value in values if value is not None), None)


def parse_line(line: bytes, value_type: type[Value]) -> Value | None:
    """None for a line of anything else."""
    try:
        # pydantic's own parser refuses the whole line for one lone surrogate, as of a file name that is not UTF-8.
        return value_type.model_validate(json.loads(line))
    except (ValueError, RecursionError):
        return None


async def probe_here(name: str, *arguments: str, result_type: type[Value], timeout_s: float) -> Value | NoValue:
    """A probe of this machine, with the python that runs us, in a process of its own."""
    argv = [sys.executable, "-m", "engine.node.probes", name, *arguments]
    done = await LocalTransport().run(argv, timeout_s=timeout_s)
    return parse_output(f"the {name} probe", done, result_type, after_s=timeout_s)
