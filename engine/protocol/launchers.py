"""The launchers of PyTorch that a job's command may begin with, whose place Flight Deck takes: it starts every rank
itself, with the environment and arguments that the launcher would have given it. And launchers inside a command, which
would start a group of their own on each rank. The options are those of the launchers' own parsers: torchrun of torch
2.13, accelerate 1.15 launch, deepspeed 0.19."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from engine.protocol.job import AUTO, TorchSettings

PASSED, IDLE, REFUSED = "passed", "idle", "refused"


class LauncherOption(NamedTuple):
    name: str
    """Its long spelling, with underscores."""
    takes_value: bool
    effect: str = REFUSED
    reason: str = ""


_RANKS = "Flight Deck starts a rank for each [[node]] and its processes itself"
_GPUS = f"{_RANKS}; CUDA_VISIBLE_DEVICES in [job] env chooses among a machine's GPUs"
_MEETING = "the ranks meet at the address of the first [[node]], on a port that is free there, chosen for each attempt"
_RESTARTS = "max_restarts and restart_commands in [recovery] say how often a run is started again"
_CORES = "ranks are not bound to cores: bind them in the program (numactl, taskset), with OMP_NUM_THREADS in [job] env"
_LOGS = "Flight Deck keeps every rank's log, see flightdeck logs"
_OF_LAUNCHER = "it concerns the launcher's own process, and there is none"

_COMMON = {
    (REFUSED, "write the program alone, without the launcher: each rank gets the same variables"): "--no_python",
    (REFUSED, "it prints the launcher's help and ends: run that in a shell"): "--help|-h",
}
_TABLE: dict[str, dict[tuple[str, str], str]] = {
    "torchrun": {
        (PASSED, ""): "--module|-m --role=",
        (IDLE, _LOGS): """--log_dir= --redirects|-r= --tee|-t= --local_ranks_filter= --logs_specs=
            --duplicate_{stdout,stderr}_filters=""",
        (IDLE, _OF_LAUNCHER): "--monitor_interval= --start_method= --event_log_handler= --run_path",
        (REFUSED, _RANKS): "--nnodes= --nproc_per_node= --node_rank= --standalone",
        (REFUSED, _MEETING): "--rdzv_{backend,endpoint,id,conf}= --master_{addr,port}= --local_addr=",
        (REFUSED, _RESTARTS): "--max_restarts=",
        (REFUSED, "stop_grace_s and term_grace_s in [recovery] are used"): "--signals_to_handle= --shutdown_timeout=",
        (REFUSED, _CORES): "--numa_binding=",
        (REFUSED, "LOCAL_RANK is the GPU's number: each rank sees all GPUs of its machine"): "--virtual_local_rank",
        **_COMMON,
    },
    "accelerate": {
        (PASSED, ""): """--config_file= --module|-m --cpu --mixed_precision= --debug --role= --enable_cpu_affinity
            --num_cpu_threads_per_process= --multi_gpu --use_{deepspeed,fsdp,megatron_lm,parallelism_config}
            --dynamo_{backend,mode}= --dynamo_use_{fullgraph,dynamic,regional_compilation} --deepspeed_config_file=
            --zero_stage= --offload_{optimizer,param}_device= --offload_{optimizer,param}_nvme_path= --zero3_init_flag=
            --gradient_{accumulation_steps,clipping}= --zero3_save_16bit_model= --deepspeed_moe_layer_cls_names=
            --fp8_use_autocast_during_eval --fp8_*= --fsdp_*= --megatron_lm_*= --parallelism_config_*=""",
        (IDLE, _LOGS): "--tee|-t= --log_dir=",
        (IDLE, _OF_LAUNCHER): "--quiet|-q --monitor_interval=",
        (REFUSED, _RANKS): """--num_processes= --num_machines= --machine_rank= --same_network --mpirun_hostfile=
            --deepspeed_{hostfile,multinode_launcher}=""",
        (REFUSED, _GPUS): "--gpu_ids= --deepspeed_{exclusion,inclusion}_filter=",
        (REFUSED, _MEETING): "--main_process_{ip,port}= --rdzv_{backend,conf}=",
        (REFUSED, _RESTARTS): "--max_restarts=",
        **_COMMON,
        (REFUSED, "TPUs are not served"): """--tpu --tpu_cluster --no_tpu_cluster --tpu_use_sudo --vm= --env=
            --main_training_function= --downcast_bf16""",
        (REFUSED, "SageMaker is not served"): "--aws_{access_key_id,secret_access_key}=",
    },
    "deepspeed": {
        (PASSED, ""): "--module --no_local_rank",
        (IDLE, _LOGS): "--enable_each_rank_log=",
        (IDLE, _OF_LAUNCHER): "--log_level= --quiet|-q --save_pid",
        (REFUSED, _RANKS): """--hostfile|-H= --num_nodes= --num_gpus|--num_accelerators= --node_rank= --launcher=
            --launcher_args= --no_ssh --no_ssh_check --force_multi""",
        (REFUSED, _GPUS): "--include|-i= --exclude|-e=",
        (REFUSED, _MEETING): "--master_{port,addr}=",
        (REFUSED, "a [[node]] names its machine by ssh, whose port may also be in ssh_config"): "--ssh_port=",
        (REFUSED, _CORES): "--bind_cores_to_rank --bind_core_list=",
        (REFUSED, "it starts trainings of its own: tune by hand, and launch with what it found"): "--autotuning=",
        (REFUSED, "python of each [[node]] is the environment"): "--venv_script=",
        **_COMMON,
    },
}
"""Launcher -> (effect, reason) -> options: "--tee|-t=" has two spellings and takes a value, "--a_{b,c}" are two, and
"--fsdp_*=" all that begin so."""

OPTIONS: dict[str, dict[str, LauncherOption]] = {
    launcher: {
        spelling: LauncherOption((before + names + after).split("|")[0], value == "=", effect, reason)
        for (effect, reason), listed in rows.items()
        for before, braced, after, value in re.findall(r"([\w|*-]+)(?:\{([\w,]+)\})?([\w|*-]*)(=?)", listed)
        for names in braced.split(",")
        for spelling in (before + names + after).split("|")
    }
    for launcher, rows in _TABLE.items()
}
"""Launcher -> each spelling, with underscores -> the option."""


def option_of(launcher: str, written: str) -> LauncherOption:
    """The option that a launcher's parser would take for `written`, without a value: accelerate's takes no
    abbreviations (allow_abbrev=False). One that it does not have is refused, and takes a value unless another
    launcher's of this name takes none."""
    name, accepted = re.sub(r"(?<=\w)-", "_", written), OPTIONS[launcher]
    family = next((key for key in accepted if key.endswith("*") and name.startswith(key[:-1])), name)
    if name in accepted or family in accepted:
        return accepted[name] if name in accepted else accepted[family]._replace(name=name)
    whole = launcher == "accelerate" or not name.startswith("--")
    meant = {option.name: option for spelling, option in accepted.items() if spelling.startswith(name) and not whole}
    if len(meant) == 1:
        return next(iter(meant.values()))
    reason = f"it stands for {', '.join(meant)}: write one of them" if meant else f"{launcher} has no such option"
    if (launcher, name) == ("deepspeed", "-m"):
        reason = "write --module, as deepspeed has it"
    elsewhere = [options[name].takes_value for options in OPTIONS.values() if name in options]
    return LauncherOption(name, all(elsewhere), reason=reason)


LAUNCHERS = {"torchrun": ("torchrun",), "accelerate": ("accelerate", "launch"), "deepspeed": ("deepspeed",)}
"""Name -> the words that a command of it begins with."""
_SPELLINGS = {
    **{words: name for name, words in LAUNCHERS.items()},
    ("accelerate-launch",): "accelerate",
    ("python", "-m", "torch.distributed.run"): "torchrun",
    ("python", "-m", "accelerate.commands.launch"): "accelerate",
    ("python", "-m", "accelerate.commands.accelerate_cli", "launch"): "accelerate",
    ("python", "-m", "deepspeed.launcher.runner"): "deepspeed",
}
_ENVIRONMENTS = frozenset({"conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "pixi", "poetry", "rye", "uv"})
_WRAPPERS = _ENVIRONMENTS | {"env", "ionice", "nice", "nohup", "numactl", "stdbuf", "taskset", "time", "timeout"}
"""Programs that run another one; the environments have a python of their own."""
MIXED_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""Accelerate's name of a precision -> that of [job]."""
_OWN_STRATEGY = ("--config_file", "--use_fsdp", "--use_deepspeed", "--use_megatron_lm", "--multi_gpu", "--cpu")


_PYTHON_FLAG = re.compile(r"-[bBdEIOPqsSuvx]+")


def _placed(words: Sequence[str], table: Mapping[tuple[str, ...], Any]) -> tuple[int, int, tuple[str, ...]] | None:
    """(from where, to before where, which key) of `table` the words have, wherever the program is, and whichever python
    has it, with flags ("python -u -m"): as the first, or behind wrappers ("uv run", "env X=1")."""
    for place in range(len(words) if words and PurePosixPath(words[0]).name in _WRAPPERS else 1):
        name = PurePosixPath(words[place]).name if words else ""
        name, rest = re.sub(r"^python3?(\.\d+)?$", "python", name), list(words[place + 1 :])
        while name == "python" and rest and _PYTHON_FLAG.fullmatch(rest[0]):
            del rest[0]
        if (key := next((key for key in table if (name, *rest[:3])[: len(key)] == key), None)) is not None:
            return place, len(words) - len(rest) + len(key) - 1, key
    return None


def _split(command: Any) -> tuple[str | None, list[str], list[str], list[str]]:
    """As `split_launcher`, and the wrappers before the launcher."""
    words = list(command) if isinstance(command, (list, tuple)) else []
    if not all(isinstance(word, str) for word in words):
        return None, [], [], []
    placed = _placed(words, _SPELLINGS)
    if placed is None:
        return None, [], words, []
    place, end, spelling = placed
    launcher, options, rest = _SPELLINGS[spelling], list[str](), words[end:]
    while rest and rest[0].startswith("-") and rest[0] != "--":
        written, joined, value = rest.pop(0).partition("=")
        if not written.startswith("--") and len(written) > 2:
            # -t3, as argparse takes it.
            written, joined, value = written[:2], "=", written[2:] + joined + value
        option = option_of(launcher, written)
        if not joined and option.takes_value:
            value = rest.pop(0) if rest else ""
        options += [option.name, value]
    return launcher, options, rest[rest[:1] == ["--"] :], words[:place]


def split_launcher(command: Any) -> tuple[str | None, list[str], list[str]]:
    """(launcher, its options, the script and its arguments); without a launcher all of it is the third. Options have
    their long names, with underscores, in even places: each is followed by its value, "" if it has none."""
    return _split(command)[:3]


def joined_options(options: Sequence[str]) -> list[str]:
    """The options of `split_launcher` as words: "--mixed_precision=bf16", so that a value may begin with a dash."""
    pairs = zip(options[::2], options[1::2])  # noqa: B905  (Python 3.9)
    return [f"{name}={value}" if value else name for name, value in pairs]


def option_value(command: Any, name: str, default: str = "") -> str:
    """The value of an option of the command's launcher."""
    options = split_launcher(command)[1]
    return options[options.index(name) + 1] if name in options[::2] else default


def idle_options(command: Any) -> list[str]:
    """Sentences about the options that have no effect here."""
    launcher, options, _ = split_launcher(command)
    chosen = [option_of(launcher, name) for name in options[::2]] if launcher else []
    idle = {option.reason: [other.name for other in chosen if other.reason == option.reason] for option in chosen}
    return [f"{', '.join(names)}: no effect, {reason}" for reason, names in idle.items() if reason]


def own_strategy(command: Any) -> str | None:
    """The option of a command's `accelerate launch` that says how the ranks divide the training, or on what."""
    launcher, options, _ = split_launcher(command)
    return next((name for name in options[::2] if launcher == "accelerate" and name in _OWN_STRATEGY), None)


def started_program(command: Sequence[str], python: str = "python") -> list[str]:
    """The program that a command comes down to, whatever starts it. `python`: for a script behind other wrappers than
    those of environments, which have their own."""
    launcher, options, program, before = _split(command)
    if launcher is None:
        return program
    has_own = not before or PurePosixPath(before[0]).name in _ENVIRONMENTS
    return [*before, "python" if has_own else python, *(["-m"] if "--module" in options else []), *program]


def with_settings(command: Sequence[str], strategy: str, keys: Mapping[str, Any]) -> list[str]:
    """An `accelerate launch` with the `strategy` and `keys` of [job] as its options (those of Accelerate 1.15), unless
    it names a configuration file, which has its own; any other command itself."""
    launcher, options, program, before = _split(command)
    named = options[::2]
    if launcher != "accelerate" or "--config_file" in named:
        return list(command)
    settings, added = TorchSettings.from_spec(dict(keys)), list[str]()
    strategy = strategy if own_strategy(command) is None else AUTO
    if strategy == "fsdp":
        reshard, offload = str(settings.sharding == "full").lower(), str(settings.offload == "cpu").lower()
        added = ["--use_fsdp", "--fsdp_version=2", f"--fsdp_reshard_after_forward={reshard}"]
        added += [f"--fsdp_offload_params={offload}", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"]
        added.append("--fsdp_state_dict_type=SHARDED_STATE_DICT")
    elif strategy == "deepspeed":
        stage, device = settings.zero_stage, settings.offload
        added = ["--use_deepspeed", f"--zero_stage={stage}", f"--offload_optimizer_device={device}"]
        added += [f"--offload_param_device={device}", "--zero3_init_flag=true"] if stage == 3 else []
        if device == "nvme":
            added += [f"--offload_{what}_nvme_path={settings.nvme_path}" for what in ("optimizer", "param")]
    if keys.get("precision", AUTO) != AUTO and "--mixed_precision" not in named:
        added.append(f"--mixed_precision={settings.precision.replace('fp32', 'no')}")
    return [*before, *LAUNCHERS[launcher], *added, *joined_options(options), *program]


def rank_command(command: Sequence[str], local_rank: int, accelerate_launch: str) -> list[str]:
    """The command of one rank in place of a launcher's; any other command itself. `accelerate_launch`: the path of
    engine/torch_trainer/accelerate_launch.py on the node."""
    launcher, options, program, before = _split(command)
    if launcher is None:
        return list(command)
    module = ["--module"] if "--module" in options else []
    if launcher == "accelerate":
        module, program = [], [accelerate_launch, *joined_options(options), *program]
    if launcher == "deepspeed" and "--no_local_rank" not in options:
        # As deepspeed.launcher.launch does.
        program = [*program[:1], f"--local_rank={local_rank}", *program[1:]]
    return started_program([*before, "torchrun", *module, *program], "{python}")


class NestedLauncher(NamedTuple):
    """A launcher within a job's command or its shell script, which each rank would start by itself."""

    name: str
    fix: str
    certain: bool
    """Else it depends on addresses, or on the machines' GPUs and configuration."""

    def __str__(self) -> str:
        does = "starts" if self.certain else "may start"
        return f"each rank {does} a group of its own by `{self.name}`, and trains a separate copy: {self.fix}"


_ALONE = "write the program that it starts alone: it is started once for each rank, with its place in the group"
_INSTEAD = 'with framework = "torch" write command = ["{0}", …]'
_BY_TORCHRUN = _INSTEAD.format('torchrun", "<script>')
# With one process accelerate hands the variables of a rank on.
_SURELY = {"accelerate": r"--multi.gpu|--num.processes[= ]([2-9]|1\d)"}
_NESTED: dict[tuple[str, ...], tuple[str, str]] = {
    **{key: (_INSTEAD.format('", "'.join(LAUNCHERS[own])), _SURELY.get(own, "")) for key, own in _SPELLINGS.items()},
    ("python", "-m", "torch.distributed.launch"): (_BY_TORCHRUN, ""),
    **{(name,): (_ALONE, "") for name in ("mpirun", "mpiexec", "mlx.launch", "horovodrun", "srun")},
    **{(name, "run"): (_BY_TORCHRUN, "") for name in ("colossalai", "fabric", "lightning", "torchx")},
    ("composer",): (_BY_TORCHRUN, ""),
    # Without options of torchrun's it runs the recipe itself.
    ("tune", "run"): (f"copy the recipe by `tune cp`, and {_BY_TORCHRUN}", r"\btune run -"),
    ("trl",): (_INSTEAD.format('accelerate", "launch", "-m", "trl.scripts.<sft, …>'), "--accelerate_config"),
    ("axolotl", "train"): (_INSTEAD.format('accelerate", "launch", "-m", "axolotl.cli.train'), "(?!)"),
    ("llamafactory-cli",): (_INSTEAD.format('torchrun", "-m", "llamafactory.launcher'), "FORCE_TORCHRUN=[1tT]"),
}
"""The words that a launcher begins with -> what to write instead, and a pattern of commands that surely start a group
of their own. Sources: trl 1.16, torchtune 0.6.1, axolotl 0.19, llamafactory 0.9.5, lightning 2.6.6."""
_SEPARATORS = re.compile(r"[;&|()`\n]+")
_FIRST = frozenset(["exec", "if", "then", "else", "do", "!", "{", "sudo", "sh", "bash", "zsh", "dash", "-c", "-lc"])
_ADDRESS = re.compile(r"--?(rdzv.endpoint|master.addr|main.process.ip|node.rank|machine.rank)[= ](?P<variable>\S*\$)?")


def nested_launcher(script: str) -> NestedLauncher | None:
    """The first launcher that a shell script starts, unless it leads all ranks into one group by their variables."""
    for line in _SEPARATORS.split(script.replace("\\\n", " ")):
        words = re.sub(r"(^|\s)#.*", "", line).replace('"', " ").replace("'", " ").split()
        words = list(itertools.dropwhile(lambda word: word in _FIRST or re.match(r"\w+=", word), words))
        placed = _placed(words, _NESTED)
        if placed is None or words[placed[1] :] in (["--help"], ["--version"]):
            continue
        (fix, certain), address = _NESTED[placed[2]], _ADDRESS.search(line)
        if address is None or not address["variable"]:
            surely = address is None and re.search(certain, " ".join(line.split())) is not None
            return NestedLauncher(" ".join(placed[2]), fix, surely)
    return None


def nested_in_command(command: Sequence[str], framework: str) -> NestedLauncher | None:
    """As `nested_launcher`, in the words of a job's command, whose own launcher Flight Deck takes the place of."""
    replaced = framework == "torch" and split_launcher(command)[0] is not None
    return None if replaced else nested_launcher(shlex.join(command))
