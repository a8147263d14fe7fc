"""A training whose ranks are joined by a slow link, beside stock mlx_lm.lora's: `uv run python -m tests.bench.links`.

Two network namespaces with a veth pair between them, held to a rate by `tc tbf` at both ends; a rank in each, held to a
core of its own. In turns on the same model, data and batch: stock mlx_lm.lora, our trainer, and ours with wire =
"int8". The tokens of a step are chosen so that the exchange of the gradients takes the wanted multiple of the time to
compute them. Reported are seconds of a step (median), bytes per trained parameter and step by the interfaces' counters,
what computing takes alone (both ranks at once, each without a peer), and what the exchange takes alone (as many bytes,
gathered by both).

With `--before FOLDER`, a checkout of an earlier commit, instead: strategy = "sharded" of both, in turns.

With `--local`, instead: strategy = "local" at 20 Mbit/s, beside itself on an unlimited link and beside stock's.

It stands for Macs, whose GPU computes while the CPU waits for the network: here one core does both, and the ring's
threads spin while they wait. So they run at a lower priority than what computes: in ours and in stock's ranks alike.

Needs root and iproute2. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final

from engine.protocol.attempt import EVENTS_ENV, SPEC_ENV, AttemptSpec, NodeFiles, RankSpec
from tests.bench.equal_data import write_equal_data, write_llama
from tests.bench.figures import Figure, machine, report

SIZES: Final = {
    "num_hidden_layers": 8,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""3.5 million parameters in the layers: 7 MB of gradients in 16 bits."""
RATES: Final = (100, 200, 500, 1000)
"""Mbit/s."""
UNLIMITED: Final = 0
WINDOW: Final = 3
"""Steps from one report to the next."""
WINDOWS: Final = 3
"""Counted, after one to warm up."""
LONGEST: Final = 256
"""Tokens of an example."""
TRIALS: Final = (16, 64)
"""Tokens per step whose time gives that of any number."""
LOCAL_RATE: Final = 20
LOCAL_TOKENS: Final = 512
"""Of each rank's step: a batch of fine-tuning."""
LOCAL_STEPS: Final = 16
SLOWED: Final = 1.15
"""The most of strategy "local", over the unlimited link."""
BYTES, INT8_RATIO, RATIO, NEVER_SLOWER, OVERLAP, SHARDED_RATIO = 2.02, 2.4, 1.7, 1.0, 1.15, 1.5
_ROOT: Final = Path(__file__).parents[2]
_LIMIT_S: Final = 900.0
_SAMPLE_S: Final = 0.05
_DEVICE: Final = "link0"
_ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Row:
    """What is trained through which link."""

    rate: int
    """Mbit/s, or UNLIMITED."""
    ratio: float
    """Time of the exchange of 2 bytes per parameter over that of the computation; UNLIMITED: as at 1 Gbit/s."""
    kind: str = "full"

    @property
    def name(self) -> str:
        link = f"{self.rate} Mbit/s" if self.rate != UNLIMITED else "unlimited"
        return f"{link}, {self.kind}, exchange {self.ratio:g} × compute"


ROWS: Final = (
    *(Row(rate, 1.0) for rate in RATES),
    *(Row(200, ratio) for ratio in (0.25, 0.5, 2.0, 4.0)),
    Row(UNLIMITED, 0.25),
    # Of as many tokens as the row above: few parameters are trained, so that it is bound by computing.
    Row(1000, 0.25, "lora"),
)


@dataclass(frozen=True)
class Trainer:
    """One of the programs compared."""

    name: str
    job: dict[str, Any] | None = field(default=None, hash=False)
    """Keys of ours; None: stock."""
    checkout: Path = _ROOT
    """Of ours."""


STOCK: Final = Trainer("stock mlx_lm.lora")
AUTO: Final = Trainer("ours", {})
INT8: Final = Trainer("ours, int8", {"wire": "int8"})
SHARDED: Final = {"strategy": "sharded"}
LOCAL: Final = Trainer("ours, local", {"strategy": "local", "local_steps": LOCAL_STEPS})


@dataclass(frozen=True)
class Measured:
    """One run, from its first report to its last."""

    step_s: float
    bytes_per_step: float
    """Sent by a rank, the mean of both."""


class Link:
    """Two namespaces and the veth pair between them; close with `close()`."""

    def __init__(self) -> None:
        self.namespaces = [f"fdlink-{os.getpid()}-{end}" for end in range(2)]
        try:
            for namespace in self.namespaces:
                _run("ip", "netns", "add", namespace)
            here, there = self.namespaces
            ends = ["netns", here, "type", "veth", "peer", "name", _DEVICE, "netns", there]
            _run("ip", "link", "add", "name", _DEVICE, *ends)
            for namespace, address in zip(self.namespaces, _ADDRESSES, strict=True):
                _run("ip", "-n", namespace, "address", "add", f"{address}/30", "dev", _DEVICE)
                for device in ("lo", _DEVICE):
                    _run("ip", "-n", namespace, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def hold(self, rate: int) -> None:
        """To so many Mbit/s in each direction, or UNLIMITED."""
        for namespace in self.namespaces:
            device = ["dev", _DEVICE, "root"]
            # There may be none to remove.
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", *device], capture_output=True, check=False)
            if rate != UNLIMITED:
                # A burst holds a whole offloaded packet of 64 KiB (else each is split, and its headers are counted),
                # and what a fast link sends between two ticks of the kernel's clock.
                burst = max(128 * 1024, rate * 1_000_000 // 8 // 200)
                held = ["tbf", "rate", f"{rate}mbit", "burst", str(burst), "latency", "100ms"]
                _run("tc", "-n", namespace, "qdisc", "add", *device, *held)

    def close(self) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


class Ranks:
    """Ranks under way, and what their interfaces have sent until now."""

    def __init__(self, directory: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._directory, self._processes = directory, processes
        self._samples: list[tuple[float, float]] = []
        """(seconds of the monotonic clock, bytes, the mean of all)"""

    def wait(self) -> None:
        """Return when all have ended well. Raises RuntimeError with the end of a log."""
        deadline = time.monotonic() + _LIMIT_S
        while any(process.poll() is None for process in self._processes):
            # Each sees its own namespace's interfaces there; until `ip` has entered it, the machine's.
            with contextlib.suppress(OSError, StopIteration):
                sent = [_sent(process.pid) for process in self._processes]
                self._samples.append((time.monotonic(), statistics.fmean(sent)))
            if time.monotonic() > deadline or any(process.poll() for process in self._processes):
                break
            time.sleep(_SAMPLE_S)
        for rank, process in enumerate(self._processes):
            if process.poll() != 0:
                log = (self._directory / f"rank{rank}.log").read_text(errors="replace")
                raise RuntimeError(f"rank {rank} of {self._directory.name}, exit code {process.poll()}: {log[-2000:]}")

    def sent(self, moment: float) -> float:
        """Bytes that a rank had sent by then, between two samples in proportion."""
        for (before, fewer), (after, more) in itertools.pairwise(self._samples):
            if before <= moment <= after:
                return fewer + (more - fewer) * (moment - before) / (after - before)
        raise RuntimeError(f"no sample at {moment}")


class Workspace:
    """Where models, data and runs lie, and how ranks are started."""

    def __init__(self, root: Path, link: Link) -> None:
        self._root, self.link, self._port = root, link, 20_000
        demo = root / "demo"
        subprocess.run([sys.executable, "-m", "engine.demo_model", str(demo)], check=True)
        write_llama(root / "model", demo / "model", SIZES, "bfloat16")
        (root / "kernels").mkdir()

    def compute(self, kind: str, tokens: int) -> tuple[float, int]:
        """Seconds of a step of so many tokens on a rank without a peer, of the slower of two at the same time; and
        the number of trained parameters."""
        directories = [self._directory() for _ in range(2)]
        with contextlib.ExitStack() as stack:
            alone = [
                stack.enter_context(self._ours(directory, self._job(directory, kind, tokens, 1), 1, core))
                for core, directory in enumerate(directories)
            ]
            for ranks in alone:
                ranks.wait()
        (start,) = _events(directories[0], "start")
        step_s = max(_step_s(_events(directory, "report")) for directory in directories)
        return step_s, int(start["trainable_parameters"])

    def exchange(self, size: int) -> float:
        """Seconds of the exchange of so many bytes of each rank."""
        log = self._directory() / "seconds.json"
        with self._started(["exchange", str(size), str(log)], log.parent) as ranks:
            ranks.wait()
        seconds: list[float] = json.loads(log.read_text())
        return statistics.median(seconds[1:])

    def run(self, trainer: Trainer, kind: str, tokens: int, window: int = WINDOW, windows: int = WINDOWS) -> Measured:
        """Two ranks of so many tokens a step each, reported every `window` steps."""
        directory = self._directory()
        job = self._job(directory, kind, tokens, 2) | {
            # One more than is counted: the last one validates, and saves.
            "iters": (1 + windows) * window + 1,
            "steps_per_report": window,
        }
        if trainer.job is None:
            config, log = directory / "options.json", directory / "reports.jsonl"
            config.write_text(json.dumps(job | {"train": True}))
            with self._started(["stock", str(config), str(log)], directory) as ranks:
                ranks.wait()
            reports = [json.loads(line) for line in log.read_text().splitlines()]
        else:
            with self._ours(directory, job | trainer.job, 2, checkout=trainer.checkout) as ranks:
                ranks.wait()
            reports = _events(directory, "report")
        sent = ranks.sent(reports[windows]["t"]) - ranks.sent(reports[0]["t"])
        return Measured(_step_s(reports, window, windows), sent / (window * windows))

    def _job(self, directory: Path, kind: str, tokens: int, ranks: int) -> dict[str, Any]:
        """mlx-lm's own keys, and the precision that it has."""
        rows = -(-tokens // LONGEST)
        length = max(1, round(tokens / rows))
        data = self._root / f"data-{length}"
        if not data.exists():
            write_equal_data(data, self._root / "model", length + 1, 4 * 2 * rows)
        return {
            "model": str(self._root / "model"),
            "data": str(data),
            "adapter_path": str(directory / "adapters"),
            "fine_tune_type": kind,
            "optimizer": "adamw",
            "optimizer_precision": "parameter",
            # As stock does. In 16 bits, a compiled update of all weights would take longer.
            **({"compile_on_cpu": True} if kind == "lora" else {}),
            "num_layers": -1,
            "batch_size": rows * ranks,
            "max_seq_length": length + 1,
            "iters": (1 + WINDOWS) * WINDOW + 1,
            "steps_per_report": WINDOW,
            "save_every": 1_000_000,
            "val_batches": 0,
        }

    @contextlib.contextmanager
    def _ours(
        self, directory: Path, job: dict[str, Any], ranks: int, core: int = 0, checkout: Path = _ROOT
    ) -> Iterator[Ranks]:
        files = _files(directory)
        files.directory.mkdir(parents=True)
        specs = [
            RankSpec(rank=rank, node=f"n{rank}", python=sys.executable, workdir=str(directory), share=1.0)
            for rank in range(ranks)
        ]
        fields: dict[str, Any] = {"run_id": "run", "attempt": 1, "nonce": "0" * 32, "backend": "ring"}
        spec = AttemptSpec(world_size=ranks, ranks=specs, job=job, **fields)
        # An earlier commit has not all fields: those left at their defaults are not written.
        defaults = {item.name: item.default for item in dataclasses.fields(spec)}
        given = {name: value for name, value in dataclasses.asdict(spec).items() if value != defaults.get(name)}
        if checkout != _ROOT:
            given.pop("group_key")
            given |= {"version": 1, "ranks": [{**rank, "host": "here"} for rank in given["ranks"]]}
        files.spec.write_text(json.dumps(given))
        own = [{SPEC_ENV: str(files.spec), EVENTS_ENV: str(files.events(rank))} for rank in range(ranks)]
        with self._started(["ours"], directory, own, core, checkout) as started:
            yield started

    @contextlib.contextmanager
    def _started(
        self,
        arguments: Sequence[str],
        directory: Path,
        environments: Sequence[dict[str, str]] = ({}, {}),
        core: int = 0,
        checkout: Path = _ROOT,
    ) -> Iterator[Ranks]:
        """tests.bench.link_rank with the modules of `checkout`, on the cores from `core`, in the namespace of each;
        ended at the end.
        """
        ranks = len(environments)
        self._port += ranks
        hosts = directory / "hosts.json"
        hosts.write_text(json.dumps([[f"{_ADDRESSES[rank]}:{self._port + rank}"] for rank in range(ranks)]))
        shared = {
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self._root / "kernels"),
            "PYTHONPATH": str(checkout),
            "PYTHONSAFEPATH": "1",
        }
        if ranks > 1:
            shared["MLX_HOSTFILE"] = str(hosts)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                place = ["ip", "netns", "exec", self.link.namespaces[core + rank], "taskset", "-c", str(core + rank)]
                program = [sys.executable, str(_ROOT / "tests" / "bench" / "link_rank.py"), *arguments]
                with (directory / f"rank{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [*place, *program],
                            cwd=checkout,
                            env={**os.environ, **shared, **environments[rank], "MLX_RANK": str(rank)},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                        )
                    )
            yield Ranks(directory, processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def _directory(self) -> Path:
        return Path(mkdtemp(prefix="run-", dir=self._root))


def _sent(pid: int) -> int:
    """Bytes sent by the link's device in the namespace of `pid`. Raises OSError, StopIteration when it is not there."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{_DEVICE}:"))
    return int(fields[8])


def _files(directory: Path) -> NodeFiles:
    return NodeFiles.for_attempt(directory / "node", "run", 1)


def _events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Rank 0's."""
    events = [json.loads(line) for line in _files(directory).events(0).read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def _step_s(reports: Sequence[dict[str, Any]], window: int = WINDOW, windows: int = WINDOWS) -> float:
    """The median of the windows'."""
    times: list[float] = [report["t"] for report in reports[: windows + 1]]
    return statistics.median(after - before for before, after in itertools.pairwise(times)) / window


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"namespaces and tc are needed, and `{' '.join(argv)}` failed: {done.stderr.strip()}")


@dataclass(frozen=True)
class Compute:
    """The time of a step of full fine-tuning on a rank without a peer, as a line over its tokens."""

    overhead_s: float
    per_token_s: float
    parameters: int
    """Trained."""

    @classmethod
    def measured(cls, workspace: Workspace) -> Compute:
        (less, parameters), (more, _) = (workspace.compute("full", tokens) for tokens in TRIALS)
        per_token_s = (more - less) / (TRIALS[1] - TRIALS[0])
        return cls(less - TRIALS[0] * per_token_s, per_token_s, parameters)

    def tokens(self, row: Row) -> int:
        """Tokens of each rank's step that take as long as the row asks for."""
        exchange_s = 2 * self.parameters * 8 / ((row.rate or max(RATES)) * 1e6)
        return max(2, round((exchange_s / row.ratio - self.overhead_s) / self.per_token_s))


def compared(workspace: Workspace, row: Row, tokens: int, rounds: int) -> Iterator[Figure]:
    """Stock and ours in turns, with so many tokens a step on each rank."""
    compute_s, parameters = workspace.compute(row.kind, tokens)
    workspace.link.hold(row.rate)
    runs: dict[Trainer, list[Measured]] = {trainer: [] for trainer in (STOCK, AUTO, INT8)}
    for _ in range(rounds):
        for trainer, measured in runs.items():
            measured.append(workspace.run(trainer, row.kind, tokens))
    steps = {trainer: statistics.median(run.step_s for run in measured) for trainer, measured in runs.items()}
    sizes = {trainer: statistics.median(run.bytes_per_step for run in measured) for trainer, measured in runs.items()}
    exchange_s = workspace.exchange(round(sizes[AUTO]))
    yield Figure(f"{row.name}: {tokens} tokens", f"compute {compute_s:.3f} s, exchange {exchange_s:.3f} s")
    for trainer, step_s in steps.items():
        each = sizes[trainer] / parameters
        ratio = steps[STOCK] / step_s
        name = f"  {trainer.name}"
        bounded = trainer is AUTO and row.kind == "full"
        yield Figure(
            f"{name}: sent", f"{each:.3f} bytes/parameter", f"<= {BYTES}" if bounded else "", round(each, 2) <= BYTES
        )
        if trainer is STOCK:
            yield Figure(f"{name}: a step", f"{step_s:.3f} s")
            continue
        least = _least(trainer, row)
        yield Figure(
            f"{name}: a step", f"{step_s:.3f} s, {ratio:.2f} × stock", f">= {least} ×" if least else "", ratio >= least
        )
    over = steps[AUTO] / max(compute_s, exchange_s)
    yield Figure("  ours: a step over max(compute, exchange)", f"{over:.2f} ×", f"<= {OVERLAP} ×", over <= OVERLAP)


def _least(trainer: Trainer, row: Row) -> float:
    """The least speed over stock's; 0 where none is asked for."""
    if row.rate == UNLIMITED or row.ratio != 1.0 or row.kind != "full":
        return NEVER_SLOWER if trainer is AUTO else 0.0
    return INT8_RATIO if trainer is INT8 else RATIO


def local_figures(workspace: Workspace, rounds: int) -> Iterator[Figure]:
    """Strategy "local" through the slow link and the unlimited one, in turns, and stock's through the slow one."""
    _, parameters = workspace.compute("full", TRIALS[0])
    runs: dict[int, list[Measured]] = {LOCAL_RATE: [], UNLIMITED: []}
    for _ in range(rounds):
        for rate, measured in runs.items():
            workspace.link.hold(rate)
            measured.append(workspace.run(LOCAL, "full", LOCAL_TOKENS, LOCAL_STEPS, 1))
    workspace.link.hold(LOCAL_RATE)
    stock_s = workspace.run(STOCK, "full", LOCAL_TOKENS, 2, 1).step_s
    held_s, free_s = (statistics.median(run.step_s for run in runs[rate]) for rate in runs)
    each = statistics.median(run.bytes_per_step for run in runs[LOCAL_RATE]) / parameters
    yield Figure(f"{LOCAL_RATE} Mbit/s, {LOCAL_TOKENS} tokens, {STOCK.name}: a step", f"{stock_s:.3f} s")
    yield Figure(f"  {LOCAL.name}: sent", f"{each:.4f} bytes/parameter")
    yield Figure(f"  {LOCAL.name}: a step", f"{held_s:.3f} s, {stock_s / held_s:.2f} × stock")
    yield Figure(f"  {LOCAL.name}, unlimited: a step", f"{free_s:.3f} s")
    ratio = held_s / free_s
    yield Figure("  through the link over unlimited", f"{ratio:.2f} ×", f"<= {SLOWED} ×", ratio <= SLOWED)


def sharded_figures(workspace: Workspace, row: Row, tokens: int, before: Path, rounds: int) -> Iterator[Figure]:
    """Strategy "sharded" of the checkout `before` and of this one, in turns."""
    workspace.link.hold(row.rate)
    trainers = [Trainer("before", SHARDED, before), Trainer("sharded", SHARDED)]
    runs: dict[Trainer, list[Measured]] = {trainer: [] for trainer in trainers}
    for _ in range(rounds):
        for trainer, measured in runs.items():
            measured.append(workspace.run(trainer, row.kind, tokens))
    before_s, sharded_s = (statistics.median(run.step_s for run in measured) for measured in runs.values())
    ratio = before_s / sharded_s
    yield Figure(f"{row.name}, sharded, {tokens} tokens: a step of the earlier commit", f"{before_s:.3f} s")
    bounded = row.ratio >= 1.0
    yield Figure(
        "  a step",
        f"{sharded_s:.3f} s, {ratio:.2f} × as fast",
        f">= {SHARDED_RATIO} ×" if bounded else "",
        not bounded or ratio >= SHARDED_RATIO,
    )


def figures(rows: Sequence[Row], rounds: int, local: bool, before: Path | None) -> Iterator[Figure]:
    with contextlib.closing(Link()) as link, TemporaryDirectory() as directory:
        workspace = Workspace(Path(directory), link)
        if local:
            yield from local_figures(workspace, rounds)
            return
        compute = Compute.measured(workspace)
        for row in rows:
            tokens = compute.tokens(row)
            if before is not None:
                yield from sharded_figures(workspace, row, tokens, before, rounds)
            else:
                yield from compared(workspace, row, tokens, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description="Trainings through a slow link, beside stock mlx_lm.lora's.")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turns")
    parser.add_argument("--rates", type=int, nargs="*", help="Mbit/s of the rows to run; 0 is unlimited")
    parser.add_argument("--ratios", type=float, nargs="*", help="exchange over compute of the rows to run")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="only strategy sharded, beside this checkout's")
    parser.add_argument("--local", action="store_true", help="only strategy local, at 20 Mbit/s")
    options = parser.parse_args()
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")) or (os.cpu_count() or 1) < 2:
        raise SystemExit(
            "root, iproute2 (ip, tc) and two cores are needed: each rank has a network and a core of its own"
        )
    # So that what runs is ended then, and the namespaces are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = [
        row
        for row in ROWS
        if (options.rates is None or row.rate in options.rates)
        and (options.ratios is None or row.ratio in options.ratios)
    ]
    print(machine())
    print(f"Llama, bfloat16, AdamW; medians of {options.rounds} rounds of {WINDOW * WINDOWS} steps, in turns")
    return report(figures(rows, options.rounds, options.local, options.before and options.before.resolve()))


if __name__ == "__main__":
    sys.exit(main())
