"""The command line: parses the arguments, calls the engine's API, and prints for people or as JSON. The console is
one of its commands.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, get_args

from engine import api
from engine.api import ExitCode, Strategy
from engine.errors import ConfigError, FlightDeckError, InputError, RunNotFound, did_you_mean
from tui.commands.terminal import DEFAULT_FILE, Lines, check_terminal, discard
from tui.encoding import prepare
from tui.formatting import seconds_of

Commands = Any
"""The type that add_subparsers returns, which argparse does not name."""
_SHELLS = ("zsh", "bash", "fish")
_QUEUE_ACTIONS = ("list", "move", "hold", "release", "cancel", "install", "uninstall")
_STRATEGIES = get_args(Strategy)
_DIVIDED = "over all nodes of the run, each with some layers; default: where it was trained sharded or as a pipeline"
_WHICH_RUN = 'id, the beginning of one, name (its newest) or "last"'


class Parser(argparse.ArgumentParser):
    """Suggests what is nearly the same as a word that it does not accept."""

    def print_help(self, file: Any = None) -> None:
        """As argparse's, but one that cannot be written is an error."""
        print(self.format_help(), end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        """argparse names all that it accepts, which for a command are too many to read."""
        if invalid := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            near = _suggestion(invalid[1], re.findall(r"'(.*?)'", invalid[2]))
            message = message.replace(f" (choose from {invalid[2]})", near) if near else message
        super().error(message)

    def refuse(self, arguments: Sequence[str]) -> NoReturn:
        options = self._option_string_actions
        near = _suggestion(arguments[0].partition("=")[0], options) if arguments[0].startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(arguments)}{near}")


def _suggestion(word: str, accepted: Iterable[str]) -> str:
    return f"; {near}" if (near := did_you_mean(word, accepted)) else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 1 a failed run or check, 2 bad usage or configuration, 130 interrupted."""
    _prepare_streams()
    Lines.cut = False
    try:
        options = _parsed(arguments)
        code: int = options.run_command(options)
        sys.stdout.flush()
        if Lines.cut:
            raise BrokenPipeError
    except BrokenPipeError:
        discard(sys.stdout)
        return _print_error(FlightDeckError("the output is cut", why="its reader has left"), ExitCode.FAILED)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except (ConfigError, InputError, RunNotFound) as error:
        return _print_error(error, ExitCode.USAGE)
    except FlightDeckError as error:
        return _print_error(error, ExitCode.FAILED)
    except OSError as error:
        discard(sys.stdout)
        what = "the output cannot be written" if error.filename is None else f"{error.filename} cannot be used"
        return _print_error(FlightDeckError(what, why=error), ExitCode.FAILED)
    return code


def _prepare_streams() -> None:
    """A stream that the caller has closed is /dev/null, so that no file that is opened takes its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    prepare(sys.stdout)
    prepare(sys.stderr)


def _run_command(options: argparse.Namespace) -> int:
    """Run a command of `tui.commands`, named "module.function"; the others are not imported."""
    engine = api.Engine()
    if options.adopts:
        _adopt(engine)
    module, _, function = options.command.rpartition(".")
    code: int = getattr(import_module(f"tui.commands.{module}"), function)(options, engine)
    for notice in engine.notices:
        print(f"flightdeck: {notice}", file=sys.stderr)
    return code


def _adopt(engine: api.Engine) -> None:
    """Whatever command starts next gives a run whose supervisor was killed another one."""
    for run in engine.runs.adopt_orphans():
        print(f"flightdeck: {run} had lost its supervisor: another one has taken over", file=sys.stderr)


def _print_error(error: FlightDeckError, code: int) -> int:
    """A configuration's faults are one line each, any other error is one line."""
    prefix = "" if isinstance(error, ConfigError) else "flightdeck: "
    print(f"{prefix}{error}", file=sys.stderr)
    return code


def _console(options: argparse.Namespace) -> int:
    """The console on a configuration, or its welcome without one. It loads the engine itself, after the first paint."""
    if "TEXTUAL_DRIVER" not in os.environ:  # which a browser's console has
        check_terminal()
    chosen: Path | None = options.config
    if chosen is None and DEFAULT_FILE.exists():
        chosen = DEFAULT_FILE
    # textual costs more than all other commands need to start.
    from tui.app import run_console

    overrides = api.parse_settings(options.before_command) if options.before_command else {}
    return run_console(_new_engine, chosen, overrides, slow_link=options.slow_link, read_only=options.read_only)


def _new_engine() -> api.Engine:
    """A function, since naming `api.Engine` loads the engine: that is left to the console's thread."""
    return api.Engine()


def _version(_: argparse.Namespace) -> int:
    # Reading a distribution's metadata costs more than parsing the command line.
    from importlib.metadata import version

    print(f"flightdeck {version('mlx-flightdeck')}")
    return ExitCode.OK


def command_parser() -> Parser:
    parser = Parser(
        prog="flightdeck",
        description="Checks, launches, watches and stops distributed training with MLX or PyTorch. Alone it opens the "
        "console.",
        epilog=_examples(
            ("flightdeck demo", "a real 2-rank training run, nothing to configure"),
            ("flightdeck", "the console on ./flightdeck.toml"),
            ("flightdeck launch --follow", "launch it and print how it goes"),
            ("flightdeck abort last", "stop the newest run, with proof"),
        )
        + "\n\nexit codes: 0 success, 1 a run or check failed, 2 bad usage or configuration, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="store_const", dest="run_command", const=_version, help="print the version and leave"
    )
    what = "default: ./flightdeck.toml, if there is one"
    parser.add_argument("-c", "--config", type=_file, metavar="FILE", help=what)
    _settings(parser, "before_command")
    parser.add_argument("--slow-link", action="store_true", help="fewer frames and no animation in the console")
    parser.add_argument("--read-only", action="store_true", help="a console without the keys that change something")
    parser.set_defaults(run_command=_console)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _starting(commands)
    _queue(commands)
    _cluster(commands)
    _history(commands)
    _tasks(commands)
    _publishing(commands)
    _shell(commands)
    return parser


def _starting(commands: Commands) -> None:
    demo = _command(
        commands,
        "demo",
        "launch.demo",
        "train a tiny model for real, on this machine alone",
        ("flightdeck demo", "in the console"),
        ("flightdeck demo --headless --ranks 3 --iters 30", "plain lines; ends with the run's exit status"),
        ("flightdeck demo --json | jq .train_loss", "the run's record at the end, progress on stderr"),
    )
    demo.add_argument("--ranks", type=_count(64), default=2, metavar="N", help="ranks on 127.0.0.1 (default 2)")
    demo.add_argument("--iters", type=_count(10_000_000), default=60, metavar="N", help="iterations (default 60)")
    demo.add_argument("--headless", action="store_true", help="plain lines; so without a terminal too")
    demo.add_argument("--slow-link", action="store_true", help="fewer frames and no animation in the console")
    _skip(demo)
    launch = _command(
        commands,
        "launch",
        "launch.launch",
        "preflight, then launch; the run goes on by itself",
        ("flightdeck launch -c flightdeck.toml", "returns once the checks have let it through"),
        ("flightdeck launch --follow", "prints how it goes; ctrl+c leaves the run alone"),
        ("flightdeck launch --queue --set learning_rate=1e-5,5e-5 --after 22:00 --for 8h", "two runs, in the night"),
        ("flightdeck launch --skip data_matches", "overrides one check by name; goes into the audit log"),
    )
    _config(launch)
    launch.add_argument("--strategy", choices=_STRATEGIES, help="in place of the job's")
    _layer_split(launch)
    launch.add_argument("--follow", action="store_true", help="print progress until the run ends, exit as it did")
    what = "put it into the queue: it starts when its nodes are free; a grid of --set is so many runs"
    launch.add_argument("--queue", action="store_true", help=what)
    launch.add_argument("--after", metavar="TIME", help='with --queue: not before "22:00", or "2026-12-01 22:00"')
    what = "with --queue: when it fails, hold all that waits"
    launch.add_argument("--stop-queue-on-failure", action="store_true", help=what)
    what = "stop it as `abort` does, saved and to be resumed, so long after its first attempt began: 30m, 8h, 2d"
    launch.add_argument("--for", type=_duration, dest="for_s", metavar="TIME", help=what)
    _skip(launch)
    resume = _command(
        commands,
        "resume",
        "launch.resume",
        "resume a run that has ended, from the newest state that any of its nodes has",
        ("flightdeck resume last", "preflight, then the run's next attempt"),
        ("flightdeck resume 20260102 --follow", "by id prefix; prints how it goes"),
    )
    _run(resume, required=True)
    resume.add_argument(
        "--accept-changed-data",
        action="store_true",
        help="go on although the data or the base model are not those that the state was saved with",
    )
    resume.add_argument(
        "--without-state",
        action="store_true",
        help="begin again at iteration 1 where no node has a state, however far the run had come",
    )
    what = "to its last iteration, though it was launched with --for; else that time begins anew"
    resume.add_argument("--without-budget", action="store_true", help=what)
    resume.add_argument("--follow", action="store_true", help="print progress until the run ends, exit as it did")
    repeat = _command(
        commands,
        "repeat",
        "launch.repeat",
        "launch a run's configuration again as a new run, on the same data with the same versions",
        ("flightdeck repeat last", "refused where data, base model or versions are others now, which it names"),
        ("flightdeck repeat last --set learning_rate=5e-5 --set lora_parameters.rank=16", "with other settings"),
    )
    _run(repeat, required=True)
    _settings(repeat)
    what = "go on although data, base model or versions are not those that the run began with"
    repeat.add_argument("--accept-changed", action="store_true", help=what)
    repeat.add_argument("--follow", action="store_true", help="print progress until the run ends, exit as it did")
    abort = _command(
        commands,
        "abort",
        "launch.abort",
        "stop a run and prove that nothing is left",
        ("flightdeck abort last", "after the current step; saves, then ends"),
        ("flightdeck abort 20260102 --now", "by id prefix, without the cooperative stop"),
    )
    _run(abort, required=True)
    abort.add_argument("--now", action="store_true", help="do not wait for the step to end: TERM, then KILL")


def _queue(commands: Commands) -> None:
    queue = _command(
        commands,
        "queue",
        "queue.queue",
        "the runs that start one after the other, each when its nodes are free",
        ("flightdeck queue", "what waits, and for what"),
        ("flightdeck queue move 4 1", "item 4 comes next"),
        ("flightdeck queue install", "it goes on after a restart of this machine; shown and asked first"),
        ("flightdeck queue hold 3", "until `flightdeck queue release 3`; or for good: `flightdeck queue cancel 3`"),
    )
    queue.add_argument("action", nargs="?", choices=_QUEUE_ACTIONS, default="list", help="default: list")
    queue.add_argument("--yes", action="store_true", help="install or uninstall without a question")
    queue.add_argument("item", nargs="?", type=_count(10**9), metavar="ITEM", help="its number, of move to cancel")
    queue.add_argument("place", nargs="?", type=_count(10**6), metavar="PLACE", help="of move: from 1")


def _cluster(commands: Commands) -> None:
    _init(commands)
    _environments(commands)
    config = _command(
        commands,
        "config",
        "config.config",
        "the configuration that counts, each value with where it was set",
        ("flightdeck config --set learning_rate=1e-5", "what is set, and all of [job]"),
        adopts=False,
    )
    _config(config)
    config.add_argument("--all", action="store_true", help="also what other tables have by default")
    config.add_argument("--plan", action="store_true", help='ask the nodes, and show what the plan chooses for "auto"')
    config.add_argument("--schema", action="store_true", help="print the JSON Schema of flightdeck.toml instead")
    _planning(commands)
    preflight = _command(
        commands,
        "preflight",
        "preflight.preflight",
        "run the checks; 1 when one would block a launch",
        ("flightdeck preflight", "every failure comes with its cause, its evidence and its fix"),
        ("flightdeck preflight --json | jq .overall_status", ""),
        adopts=False,
    )
    _config(preflight)
    _skip(preflight)
    data = _command(
        commands,
        "data",
        "data.data",
        "what a job trains on: how it was read, its lengths, and rows as the model sees them",
        ("flightdeck data", "of ./flightdeck.toml, as its first node has it"),
        ("flightdeck data sharegpt.json --model ~/models/Qwen3-0.6B", "without a configuration, on this machine"),
        ("flightdeck data qa.csv --write data", "train.jsonl and valid.jsonl, as mlx-lm reads them"),
        adopts=False,
    )
    _config(data)
    what = 'a file or folder of this machine, or "hf:org/set SUBSET" in its cache, with mlx-lm\'s defaults, in place '
    data.add_argument("path", nargs="?", metavar="PATH", help=f"{what}of the configuration's data")
    data.add_argument("--model", type=Path, metavar="DIR", help="with PATH: the model whose tokens are counted")
    data.add_argument("--rows", type=_count(1000), default=10, metavar="N", help="rows that are shown (default 10)")
    what = "write train.jsonl, valid.jsonl and test.jsonl into DIR, which is made; none is overwritten"
    data.add_argument("--write", type=Path, metavar="DIR", help=what)
    nodes = _command(
        commands,
        "nodes",
        "nodes.nodes",
        "each node's chip, memory, disk, versions and links",
        ("flightdeck nodes -c flightdeck.toml", "probes every node now; - is not measured"),
        ("flightdeck nodes --trust SHA256:…", "accepts exactly that host key, where a node shows it"),
        ("flightdeck nodes --setup", "gives each Thunderbolt cable a network of its own, after a question"),
        ("flightdeck nodes --json | jq .topology", "nodes, topology and network plan in one document"),
        adopts=False,
    )
    _config(nodes)
    nodes.add_argument(
        "--trust",
        nargs="?",
        const="",
        action="append",
        default=[],
        metavar="FINGERPRINT",
        help="accept the new host key of this fingerprint, compared on the node itself; may be repeated; "
        "alone: ask for each new key, as without --json on a terminal",
    )
    nodes.add_argument(
        "--setup",
        action="store_true",
        help="where Thunderbolt cables have no network of their own: show the commands that give them some, ask, run "
        "them on each node over ssh -t (sudo asks for the password), and probe again; they last until a restart",
    )
    _models(commands)
    notify = _command(
        commands,
        "notify",
        "notify.notify",
        "send a test by each channel of [notify], and say what came back; 1 when one failed",
        ("flightdeck notify test", "as ./flightdeck.toml has them"),
        adopts=False,
    )
    notify.add_argument("action", choices=("test",), help="send a test")
    _config(notify)
    _command(
        commands,
        "doctor",
        "preflight.doctor",
        "what this machine has and lacks",
        ("flightdeck doctor", "MLX and its backends, ssh, RDMA, disk, terminal"),
        adopts=False,
    )


def _models(commands: Commands) -> None:
    models = _command(
        commands,
        "models",
        "models.models",
        "the models and data sets that each node has, and their copying from node to node",
        ("flightdeck models", "size, revision, what is missing or damaged, in caches and model folders of all nodes"),
        (
            "flightdeck models push org/name",
            "onto all nodes from whoever has it; what is there is verified, and repaired",
        ),
        ("flightdeck models push ~/models/mine --to bea", "a folder of this machine, to ~/models/mine there"),
        ("flightdeck models pull org/name --node bea", "into this machine's cache"),
        ("flightdeck models verify org/name", "hashes each file on each node; 1 where one is damaged"),
        ("flightdeck models rm org/name --node bea", "after a question; not while a run uses it"),
        adopts=False,
    )
    models.add_argument(
        "action",
        nargs="?",
        choices=("list", "push", "pull", "verify", "rm"),
        default="list",
        metavar="list|push|pull|verify|rm",
        help="default: list",
    )
    what = "org/name of the Hugging Face Hub, with hf: before it a data set; or a folder"
    models.add_argument("name", nargs="?", metavar="NAME", help=what)
    models.add_argument("--to", nargs="+", default=[], metavar="NODE", help="push: these nodes alone")
    models.add_argument("--node", metavar="NODE", help="pull: from this node; rm: on this node")
    models.add_argument("--dataset", action="store_true", help="NAME is a data set")
    models.add_argument("--replace", action="store_true", help="push of a folder: also files that differ there")
    models.add_argument("--yes", action="store_true", help="rm: without a question")
    _config(models)


def _environments(commands: Commands) -> None:
    made = _command(
        commands,
        "environments",
        "environments.environments",
        "python environments on the nodes: list them, make one on each, remove one",
        ("flightdeck environments make", "shows what would be made, asks, and writes `python` of each [[node]]"),
        ("flightdeck environments make --node ana --yes", "on one node, without a question"),
        ("flightdeck environments make --offline", "from wheels that this machine downloads and sends"),
        ("flightdeck environments remove ID", "refused while a configuration or a run uses it"),
        adopts=False,
    )
    _config(made)
    made.add_argument("action", nargs="?", choices=("list", "make", "remove"), default="list", metavar="ACTION",
                      help="list, make or remove; default: list")  # fmt: skip
    made.add_argument("id", nargs="?", metavar="ID", help="with remove: which, as the list names it")
    made.add_argument("--node", action="append", default=[], metavar="NAME", help="only there; may be repeated")
    made.add_argument("--offline", action="store_true", help="with make: send wheels, also where an index is reached")
    made.add_argument("--yes", action="store_true", help="do not ask")


def _planning(commands: Commands) -> None:
    plan = _command(
        commands,
        "plan",
        "plan.plan",
        "what would be launched, on what, and why; every figure from a fact, the job or the calibration",
        ("flightdeck plan", "as text"),
        ("flightdeck plan --explain", "the reason of each choice, and where its figure came from"),
        ("flightdeck plan --json | jq .batch_configuration", "the document, version 2.0.0"),
        ("flightdeck plan --format v1", "the older document"),
        (
            "flightdeck plan --write DIR",
            "write accelerate_config.yaml, ds_config.json, pytorchjob.yaml of a PyTorch job",
        ),
        ("flightdeck plan --longest --model Qwen/Qwen3-4B --memory 64", "what fits, before anything is downloaded"),
        ("flightdeck plan --apply", "write the suggested batch, learning rate and warm-up into flightdeck.toml"),
        adopts=False,
    )
    _config(plan)
    plan.add_argument("--explain", action="store_true", help="why each choice was made, in prose")
    plan.add_argument("--format", choices=("v1", "v2"), help="print the document of this version, as --json does")
    plan.add_argument("--strategy", choices=_STRATEGIES, help="plan as if the job said so")
    plan.add_argument(
        "--apply",
        action="store_true",
        help="write the suggested batch, learning rate and warm-up into [job]; the former file is kept as FILE.bak",
    )
    plan.add_argument(
        "--write",
        metavar="DIR",
        help="write the files that PyTorch's own tools take into this folder; with --json their paths are `written`",
    )
    plan.add_argument("--longest", action="store_true", help="the longest sequence that fits each node, by method")
    plan.add_argument("--largest-batch", action="store_true", help="the largest batch that fits each node, by method")
    what = "with these, in place of the job's: its folder or config.json on this machine, or OWNER/NAME of the Hub"
    plan.add_argument("--model", metavar="MODEL", help=what)
    plan.add_argument("--memory", type=_count(10**6), metavar="GB", help="with these: of a Mac, in place of the nodes")
    _layer_split(plan)
    calibrate = _command(
        commands,
        "calibrate",
        "calibrate.calibrate",
        "measure the job's training step on every node, and the links between them",
        ("flightdeck calibrate --quick", "10 s per node"),
        ("flightdeck calibrate --json | jq '.nodes[].examples_per_s'", ""),
        ("flightdeck calibrate --show", "what was measured last"),
        ("flightdeck calibrate --scaling --csv scaling.csv", "what each rank more brings, and where it stops paying"),
    )
    _config(calibrate)
    calibrate.add_argument("--quick", action="store_true", help="10 s of measuring per node, in place of 120")
    calibrate.add_argument("--show", action="store_true", help="print what is stored; nothing is measured")
    calibrate.add_argument(
        "--scaling", action="store_true", help="time the job's real steps over 1, 2, ... of its ranks instead"
    )
    calibrate.add_argument(
        "--per-rank-batch",
        action="store_true",
        help="with --scaling: keep each rank's part of the batch (weak scaling) instead of the whole batch",
    )
    calibrate.add_argument(
        "--csv", type=_file, metavar="FILE", help="with --scaling: write the table as CSV, - prints it"
    )
    sync = _command(
        commands,
        "sync",
        "preflight.sync",
        "make every node's workdir the same as this machine's, and prove it",
        ("flightdeck sync", "runs [preflight] sync_script; without one, our own rsync"),
        ("flightdeck sync --dry-run", "compares only; 1 when a node differs"),
        adopts=False,
    )
    _config(sync)
    sync.add_argument("--dry-run", action="store_true", help="compare the trees, copy nothing")


def _init(commands: Commands) -> None:
    init = _command(
        commands,
        "init",
        "init.init",
        "write a first flightdeck.toml, from hosts that are named or found",
        ("flightdeck init ana@ultra.local bea@max.local", "finds a python with mlx and mlx-lm on each"),
        ("flightdeck init", "lists the hosts of ~/.ssh/config and Bonjour, and lets you choose"),
        ("flightdeck init --from-ssh-config --yes", "all of ~/.ssh/config"),
        ("flightdeck init --yes --model ~/m --data ~/d ana bea", "then `flightdeck launch` needs nothing more"),
        ("flightdeck init --hostfile hosts.json", "MLX's JSON, or lines of host:slots"),
        adopts=False,
    )
    init.add_argument("hosts", nargs="*", metavar="HOST", help="[user@]host[:port]; 127.0.0.1 is this machine")
    init.add_argument("--from-ssh-config", action="store_true", help="search ~/.ssh/config")
    init.add_argument("--bonjour", action="store_true", help="search for machines that announce ssh (about 3 s)")
    init.add_argument("--hostfile", type=_file, metavar="FILE", help="take the hosts from this hostfile")
    init.add_argument("-o", "--output", type=_file, metavar="FILE", help="default: ./flightdeck.toml; - prints it")
    init.add_argument("--name", metavar="NAME", help="of the cluster; default: the folder's")
    init.add_argument("--force", action="store_true", help="write over a file that is there")
    init.add_argument("--model", metavar="NAME", help="[job] model: a folder on the nodes, or org/name")
    init.add_argument(
        "--data", metavar="NAME", help='[job] data: a folder or file on the nodes, or "hf:org/set SUBSET"'
    )
    init.add_argument("--method", choices=("lora", "dora", "full"), help="[job] fine_tune_type; default: lora")
    init.add_argument("--iters", type=_count(10_000_000), metavar="N", help="[job] iters; default: 1000")
    what = "accept the host key with this fingerprint, which a person has compared; may be repeated"
    init.add_argument("--trust", action="append", default=[], metavar="FINGERPRINT", help=what)
    what = "ask nothing: take every host that was found, and make environments where there is no mlx"
    init.add_argument("--yes", action="store_true", help=what)


def _history(commands: Commands) -> None:
    runs = _command(
        commands,
        "runs",
        "runs.runs",
        "every run, newest first",
        ("flightdeck runs -n 5", "the last five"),
        ("flightdeck runs --filter 'state:failed lr<1e-4 age<7d'", "and, or, not, -, ( ) combine terms"),
        ("flightdeck runs --filter 'tag:night or note:*' --sort val", "by the last validation loss, lowest first"),
    )
    runs.add_argument("-n", "--limit", type=_count(1_000_000), metavar="N", help="only the first N")
    runs.add_argument("--filter", default="", metavar="TERMS", help="field:text, field<figure, or words of name or id")
    runs.add_argument("--sort", metavar="FIELD", help="ascending; -FIELD descending")
    _annotations(commands)
    _comparing(commands)
    _web(commands)
    show = _command(
        commands,
        "show",
        "runs.show",
        "one run: its state, why, what proves it, and where its files are",
        ("flightdeck show", "the newest"),
        ("flightdeck show demo", "by name: its newest; or by id, or the beginning of one"),
    )
    _run(show)
    fetch = _command(
        commands,
        "fetch",
        "results.fetch",
        "copy what a run has left to this machine, from whichever node has it, and verify it",
        ("flightdeck fetch last", "the newest adapter, or the weights of a full training, to ./RUN"),
        ("flightdeck fetch demo DIR --best", "those of the best validation (save_best = true)"),
        ("flightdeck fetch last --checkpoint", "the newest state to resume from, all parts from all nodes"),
    )
    _run(fetch, required=True)
    fetch.add_argument("folder", nargs="?", type=_file, metavar="DIR", help="default: ./RUN, by its id")
    wanted = fetch.add_mutually_exclusive_group()
    for name, what in (
        ("best", "the weights of the best validation"),
        ("checkpoint", "the newest state that was saved whole"),
        ("weights", "full weights: the whole model, or all trained layers"),
        ("fused", "the model that the newest `fuse` has left, to ./RUN-fused"),
    ):
        wanted.add_argument(f"--{name}", action="store_const", dest="wanted", const=name, default="trained", help=what)
    log = _command(
        commands,
        "logs",
        "runs.logs",
        "what the ranks printed, made harmless for a terminal; --raw gives the bytes as they were",
        ("flightdeck logs", "the newest run, all ranks, `rank | line`"),
        ("flightdeck logs last --rank 1 -f", "follow one rank; ends when the run has ended"),
        ("flightdeck logs demo -n 50", "the last 50 lines"),
        ("flightdeck logs last --rank 0 --raw > rank0.log", "the exact bytes"),
    )
    _run(log)
    log.add_argument("-f", "--follow", action="store_true", help="go on as lines come, until the run has ended")
    log.add_argument("-n", "--lines", type=_count(10**9, least=0), metavar="N", help="start at the last N lines")
    which = log.add_mutually_exclusive_group()
    which.add_argument("--rank", type=_count(10_000, least=0), metavar="K", help="only rank K")
    which.add_argument("--launcher", action="store_true", help="only what mlx.launch itself printed")
    log.add_argument("--raw", action="store_true", help="bytes as they were; needs --rank or --launcher")
    metrics = _command(
        commands,
        "metrics",
        "runs.metrics",
        "the reports in order, in mlx-lm's names",
        ("flightdeck metrics", "a table"),
        ("flightdeck metrics last --format csv > loss.csv", ""),
        ("flightdeck metrics demo --json | jq '.[-1].train_loss'", ""),
        ("flightdeck metrics last --chart loss.svg", "the loss over the iterations, as a picture"),
        ("flightdeck metrics --try train.log", "what would be read from a program's output; 1 when nothing is"),
    )
    _run(metrics)
    _config(metrics)
    metrics.add_argument(
        "--try",
        dest="tried",
        type=_file,
        metavar="FILE",
        help="in place of a run's: those that would be read from this log of a command, - is standard input, by "
        "`metrics` of [job] where the configuration has it",
    )
    metrics.add_argument("--format", choices=("table", "json", "csv"), default="table", help="default: table")
    metrics.add_argument("--chart", type=_file, metavar="FILE", help="draw a chart into FILE.svg or FILE.png instead")
    metrics.add_argument("--metric", metavar="NAME", help="of the chart: loss (default), step time, memory, power, …")
    metrics.add_argument("--axis", choices=("iterations", "tokens", "time"), default="iterations", help="of the chart")
    metrics.add_argument("--average", action="store_true", help="of the chart: a moving average in its band")


def _web(commands: Commands) -> None:
    web = _command(
        commands,
        "web",
        "web.web",
        "the console in a browser, without the keys that change something, until ctrl+c",
        ("flightdeck web", "prints the address, with a token that is another one at each start"),
        ("ssh -L 8095:127.0.0.1:8095 ana@ultra.local", "from another machine; it is never open to a network"),
    )
    _config(web)
    web.add_argument("--host", default="127.0.0.1", metavar="HOST", help="a loopback address; default: 127.0.0.1")
    what = "default: 8095; 0: a free one"
    web.add_argument("--port", type=_count(65_535, least=0), default=8095, metavar="PORT", help=what)


def _annotations(commands: Commands) -> None:
    tag = _command(
        commands,
        "tag",
        "history.tag",
        "tags of a run, by which runs are filtered",
        ("flightdeck tag last night baseline", "adds two"),
        ("flightdeck tag demo --remove night", ""),
    )
    _run(tag, required=True)
    tag.add_argument("tags", nargs="*", metavar="TAG", help="letters, digits, - and _")
    tag.add_argument("--remove", action="append", default=[], metavar="TAG", help="may be repeated")
    note = _command(
        commands,
        "note",
        "history.note",
        "a line of your own about a run",
        ('flightdeck note last "too high a learning rate"', 'replaces it; "" removes it'),
        ("flightdeck note demo", "prints it"),
    )
    _run(note, required=True)
    note.add_argument("text", nargs="?", metavar="TEXT", help="at most 500 characters")
    delete = _command(
        commands,
        "delete",
        "history.delete",
        "delete runs that have ended: their folders here and on every node, once you have agreed",
        ("flightdeck delete demo", "says what it frees on each machine, and asks"),
        ("flightdeck delete 20260102 --yes", "1 where a node does not answer: the run stays listed then"),
        adopts=False,
    )
    _several_runs(delete)
    delete.add_argument("--yes", action="store_true", help="without a question")
    what = "delete a run here although a node keeps its folder; that is named"
    delete.add_argument("--anyway", action="store_true", help=what)


def _comparing(commands: Commands) -> None:
    compare = _command(
        commands,
        "compare",
        "compare.compare",
        "what differs between runs, which is best, and why their speeds differ",
        ("flightdeck compare last 20260102", "only what differs: configuration, data, versions, plan, result"),
        ("flightdeck compare a b c --json | jq .speeds", ""),
    )
    _several_runs(compare)
    export = _command(
        commands,
        "export",
        "compare.export",
        "the metrics of one or several runs, for other programs",
        ("flightdeck export a b --format csv > metrics.csv", "a row a report, with its run"),
        ("flightdeck export last --format jsonl -o metrics.jsonl", ""),
        ("flightdeck export a b --format tensorboard -o logs", "a folder for each run below logs"),
    )
    _several_runs(export)
    export.add_argument("--format", choices=("csv", "jsonl", "tensorboard"), default="csv", help="default: csv")
    export.add_argument("-o", "--output", type=_file, metavar="PATH", help="default: -, standard output")


def _of_run(parser: argparse.ArgumentParser) -> None:
    """The options of a task on a run's result."""
    _run(parser)
    what = "the weights that were saved last by themselves, although a checkpoint is newer"
    parser.add_argument("--saved", action="store_true", help=what)


def _tasks(commands: Commands) -> None:
    evaluate = _command(
        commands,
        "eval",
        "tasks.evaluate",
        "loss and perplexity of the base model and of what a run has trained, over the run's nodes",
        ("flightdeck eval", "of the newest training, on its test data, else on what it was validated with"),
        ("flightdeck eval demo --split valid --json | jq .task_results", ""),
        ("flightdeck eval demo --tasks arc_easy,hellaswag", "by lm-eval, on the node that has the weights"),
    )
    _of_run(evaluate)
    evaluate.add_argument("--split", choices=("valid", "test"), help="default: test where there is one, else valid")
    evaluate.add_argument("--batches", type=_count(10**9), metavar="N", help="at most N batches; default: all")
    what = "in place of the loss: the scores of lm-eval's tasks of these names, with commas between"
    evaluate.add_argument("--tasks", type=_names, metavar="NAMES", help=what)
    evaluate.add_argument("--limit", type=_count(10**9), metavar="N", help="at most N examples of each task")
    what = "examples before each question; default: as each task says"
    evaluate.add_argument("--num-fewshot", type=_count(10**6, least=0), metavar="N", help=what)
    what = "a folder of tasks of your own on the node, as lm-eval's --include_path"
    evaluate.add_argument("--include-path", metavar="DIR", help=what)
    what = "ask as in a chat, as lm-eval's option does; default: as plain text"
    evaluate.add_argument("--apply-chat-template", action="store_const", const=True, help=what)
    fuse = _command(
        commands,
        "fuse",
        "tasks.fuse",
        "fuse what a run has trained into a copy of its base model, and measure what is kept of the gain",
        ("flightdeck fuse", "1, and nothing is left, when less than 95 % of the gain is kept"),
        ("flightdeck fuse demo --dequantize", "a quantized base rounds small updates away; in 16 bits they stay"),
    )
    _of_run(fuse)
    fuse.add_argument(
        "--keep", type=_share, default=api.KEEP, metavar="SHARE", help=f"of the gain, 0 to 1; default: {api.KEEP}"
    )
    form = fuse.add_mutually_exclusive_group()
    form.add_argument("--dequantize", action="store_true", help="write a quantized base's weights in 16 bits")
    form.add_argument(
        "--bits", type=int, choices=(2, 3, 4, 5, 6, 8), metavar="N", help="quantize the result anew with so many bits"
    )
    what = "folder of the fused model on the node that has the weights; default: in the task's own folder there"
    fuse.add_argument("--to", metavar="DIR", help=what)
    fuse.add_argument("--divided", action=argparse.BooleanOptionalAction, help=f"measured {_DIVIDED}")
    generate = _command(
        commands,
        "generate",
        "tasks.generate",
        "answer prompts with what a run has trained",
        ('flightdeck generate -p "Hello"', "with the newest training's weights"),
        ('flightdeck generate demo -p "Hello" --compare', "with the base model, too"),
        ('flightdeck generate demo -p "Hello" --divided', "the model's layers divided over the run's nodes"),
    )
    _of_run(generate)
    generate.add_argument(
        "-p", "--prompt", type=_prompt, action="append", required=True, metavar="TEXT", help="may be repeated"
    )
    which = generate.add_mutually_exclusive_group()
    which.add_argument("--base", action="store_true", help="the base model in place of what was trained")
    which.add_argument("--compare", action="store_true", help="the base model, and then what was trained")
    generate.add_argument("--divided", action=argparse.BooleanOptionalAction, help=_DIVIDED)
    generate.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    generate.add_argument("--max-tokens", type=_count(1_000_000), default=256, metavar="N", help="default: 256")
    generate.add_argument("--temperature", type=_number, default=0.0, metavar="T", help="default: 0, the likeliest")
    generate.add_argument("--top-p", type=_share, default=1.0, metavar="P", help="default: 1, all tokens")
    generate.add_argument("--seed", type=_count(2**31, least=0), default=0, metavar="N", help="default: 0")
    _serving(commands)


def _serving(commands: Commands) -> None:
    most = f"of an answer; default: {api.ANSWER_TOKENS}"
    serve = _command(
        commands,
        "serve",
        "tasks.serve",
        "serve what a run has trained by the OpenAI API, until that is aborted",
        ("flightdeck serve", "the newest training's weights, at http://127.0.0.1:8080/v1 of the node that has them"),
        ("flightdeck serve demo --divided", "the model's layers divided over the run's nodes"),
        ("flightdeck serve demo --host 192.168.0.2", "for other machines, whose clients need the token that it prints"),
    )
    _of_run(serve)
    serve.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to listen on; default: 127.0.0.1")
    what = f"default: {api.SERVE_PORT}; 0: a free one"
    serve.add_argument("--port", type=_count(65_535, least=0), default=api.SERVE_PORT, metavar="PORT", help=what)
    serve.add_argument("--divided", action=argparse.BooleanOptionalAction, help=_DIVIDED)
    serve.add_argument("--max-tokens", type=_count(1_000_000), default=api.ANSWER_TOKENS, metavar="N", help=most)
    serve.add_argument("--follow", action="store_true", help="print what happens until it has ended")
    chat = _command(
        commands,
        "chat",
        "chat.chat",
        "ask what a run has trained, line by line",
        ("flightdeck chat", "the newest training; /base asks the base model"),
        ("echo Hello | flightdeck chat demo --json", "one message, and the answer as JSON"),
        ("flightdeck chat --server demo-serve", "one that is served already"),
    )
    _run(chat)
    chat.add_argument("--server", metavar="RUN", help="ask this one, in place of a server of its own")
    chat.add_argument("--base", action="store_true", help="begin with the base model")
    chat.add_argument("--divided", action=argparse.BooleanOptionalAction, help=_DIVIDED)
    chat.add_argument("--max-tokens", type=_count(1_000_000), default=api.ANSWER_TOKENS, metavar="N", help=most)


def _publishing(commands: Commands) -> None:
    publish = _command(
        commands,
        "publish",
        "results.publish",
        "the weights of a run for LM Studio, Ollama or llama.cpp, or on the Hugging Face Hub, with a model card",
        ("flightdeck publish last --hub ana/support-lora --private", "the adapter; again, where it broke off"),
        ("flightdeck publish last --lmstudio", "the fused model, into ~/.lmstudio/models"),
        ("flightdeck publish last --ollama models", "a folder with a Modelfile, and what to run next"),
        ("flightdeck publish last --from DIR --gguf models", "llama.cpp's commands; nothing is run"),
    )
    _run(publish)
    what = "a folder with an adapter or a whole model (default: the fused model, else what `fetch` brings)"
    source = publish.add_mutually_exclusive_group()
    source.add_argument("--from", dest="source", type=_file, metavar="DIR", help=what)
    source.add_argument("--fused", action="store_true", help="on the Hub, too, the fused model and not the adapter")
    target = publish.add_mutually_exclusive_group(required=True)
    for option, what in (
        ("--lmstudio", "below LM Studio's models (default: ~/.lmstudio/models)"),
        ("--ollama", "a Modelfile beside the weights, below DIR (default: here)"),
        ("--gguf", "the weights below DIR (default: here), and the commands that convert and quantize them"),
    ):
        target.add_argument(option, nargs="?", const="", type=_folder, metavar="DIR", help=what)
    what = "upload; the token is HF_TOKEN, or that of `hf auth login`; what has arrived is not sent twice"
    target.add_argument("--hub", metavar="OWNER/NAME", help=what)
    publish.add_argument("--private", action="store_true", help="with --hub: a private repository")
    publish.add_argument("--base-model", metavar="OWNER/NAME", help="for the card: the base model's name on the Hub")
    publish.add_argument("--license", metavar="ID", help="for the card, as the Hub names it, such as apache-2.0")


def _shell(commands: Commands) -> None:
    completion = _command(
        commands,
        "completion",
        "",
        "a script by which the shell completes commands, options, files and runs",
        ("flightdeck completion zsh > ~/.zfunc/_flightdeck", "fpath+=~/.zfunc before compinit in ~/.zshrc"),
        ("flightdeck completion bash > ~/.local/share/bash-completion/completions/flightdeck", "needs bash-completion"),
        ("flightdeck completion fish > ~/.config/fish/completions/flightdeck.fish", ""),
        json=False,
    )
    completion.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    completion.set_defaults(run_command=_completion)
    what = "what a command does, with its options and examples"
    asked = _command(
        commands, "help", "", what, ("flightdeck help launch", "as `flightdeck launch --help`"), json=False
    )
    asked.add_argument(
        "about", nargs="?", choices=tuple(commands.choices), metavar="COMMAND", help="default: all, in short"
    )
    asked.set_defaults(run_command=_help)


def _help(options: argparse.Namespace) -> int:
    parser = command_parser()
    if options.about is None:
        parser.print_help()
    else:
        parser.parse_args([options.about, "--help"])
    return ExitCode.OK


def _completion(options: argparse.Namespace) -> int:
    # shtab is needed for nothing else.
    from tui.commands.completion import script

    print(script(command_parser(), options.shell, api.state_home()))
    return ExitCode.OK


def _command(
    commands: Commands,
    name: str,
    command: str,
    summary: str,
    *examples: tuple[str, str],
    adopts: bool = True,
    json: bool = True,
) -> argparse.ArgumentParser:
    """A command, with --json where it has a document, its summary in both helps, and its examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=_examples(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if json:
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run_command=_run_command, command=command, adopts=adopts, parser=parser)
    return parser


def _config(parser: argparse.ArgumentParser) -> None:
    # No default of its own, so that -c before the command is not overwritten.
    what = "default: ./flightdeck.toml"
    parser.add_argument("-c", "--config", type=_file, default=argparse.SUPPRESS, metavar="FILE", help=what)
    what = "run what the file names (interpreters, scripts, a model's own code), without a question from now on"
    parser.add_argument("--accept", action="store_true", help=what)
    _settings(parser)


def _settings(parser: argparse.ArgumentParser, into: str = "set") -> None:
    what = "another value, as in TOML, of a key of [job], or of another table (checkpoint.every=50); may be repeated"
    parser.add_argument("--set", action="append", default=[], dest=into, metavar="KEY=VALUE", help=what)


def _layer_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layer-split", metavar="0-8,8-36", help="a pipeline's layers of each rank; default: by memory"
    )


def _skip(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip", action="append", default=[], metavar="CHECK", help="override a check by name; may be repeated"
    )


def _run(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    if required:
        parser.add_argument("run", metavar="RUN", help=_WHICH_RUN)
    else:
        parser.add_argument("run", metavar="RUN", nargs="?", default="last", help=f"{_WHICH_RUN}; default: last")


def _several_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=_WHICH_RUN)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser()
    given = "\0".join(["", *(sys.argv[1:] if arguments is None else arguments)])
    # What excludes or reverses begins with a "-", which argparse takes for an option.
    given = re.sub(r"\0(--filter|--sort)\0(?=-(?!-|[hn]\0))", r"\0\1=", f"{given}\0").removesuffix("\0")
    options, rest = parser.parse_known_args(given.split("\0")[1:])
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(options, "folder", "") is None:
        # argparse gives an optional argument nothing once an option has followed the one before it.
        options.folder = _file(rest.pop())
    if rest:
        getattr(options, "parser", parser).refuse(rest)
    if options.read_only and options.run_command is not _console:
        parser.error("--read-only is for the console: it stands before no command")
    if options.before_command and options.run_command is not _console:
        parser.error("--set stands behind the command")
    return options


def _count(most: int, least: int = 1) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} to {most:,}")
        return number

    return parse


def _names(text: str) -> list[str]:
    """An argparse type: names with commas between."""
    return [name for name in map(str.strip, text.split(",")) if name]


def _prompt(text: str) -> str:
    """An argparse type: a text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _number(text: str, most: float = 100.0) -> float:
    """An argparse type: a number from 0 to `most`."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to {most:g}")
    return number


def _duration(text: str) -> float:
    """An argparse type: a length of time, in seconds."""
    try:
        return seconds_of(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _share(text: str) -> float:
    return _number(text, 1.0)


def _file(text: str) -> Path:
    """An argparse type: a file's path, or - for stdout; never one that a message could not show."""
    accepted = api.path_fault(text) if text != "-" else None
    if accepted is not None:
        raise argparse.ArgumentTypeError(f"{api.safe_repr(text)}: expected {accepted}")
    return Path(text)


def _folder(text: str) -> str:
    """As `_file`; empty for the default."""
    return str(_file(text)) if text else text


def _examples(*examples: tuple[str, str]) -> str:
    width = max(len(example) for example, _ in examples)
    return "\n".join(["examples:", *(f"  {example:<{width}}   {text}".rstrip() for example, text in examples)])
