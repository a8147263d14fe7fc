"""The known texts of failures (of MLX, mlx-lm, ssh and the operating system), each with its cause and its fix in words:
data, which `engine.run.failure_cause` looks for in logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from engine.models import Reason


class SignatureKind(IntEnum):
    """How much a match explains; a lower one goes before a higher."""

    CAUSE = 0
    """Explains the end by itself."""
    CONSEQUENCE = 1
    """A rank prints it because another one, or a link, failed before: used only when nothing better is known."""
    NOISE = 2
    """Printed in healthy runs too, or about a rank that another log explains: never used."""


class Provenance(StrEnum):
    """How well the meaning of the text is known."""

    REPRODUCED = "reproduced"
    """Made to happen with real programs."""
    SOURCE = "source"
    """Read in the source of the program that prints it."""
    REPORTED = "reported"
    """Reported by others in an issue or a pull request; not seen here."""
    ASSUMED = "assumed"
    """Taken from the text itself."""


class Citation(NamedTuple):
    """Where a text is from: a program, a file of its source, or an issue as repository#number."""

    text: str
    proof: Provenance


@dataclass(frozen=True)
class Signature:
    """`cause` and `fix` may name the pattern's groups; `{errno}` is replaced by its name and number."""

    id: str
    pattern: str
    """A regular expression for a place within one line. Nothing in it but `\\d+` repeats without a bound, so that no
    line costs more than a constant times its length."""
    cause: str
    fix: str
    example: str
    """A line as the program prints it."""
    source: Citation
    kind: SignatureKind = SignatureKind.CAUSE
    reason: Reason | None = None
    """The reason for which a run ends by it, where that is one of its own."""


_ERRORS: Final = (
    ("the other side has gone", 2),
    ("permission denied", 13),
    ("a bad address", 14),
    ("invalid argument", 22),
    ("the port is in use", 48, 98),
    ("the address is not on this host", 49, 99),
    ("the connection was reset", 54, 104),
    ("it timed out", 60, 110),
    ("it was refused", 61, 111),
    ("there is no route to the host", 65, 113),
)
"""Each with its number, or with those of macOS and Linux; none of these means different things on the two."""
ERRNO_NAMES: Final = {str(number): name for name, *numbers in _ERRORS for number in numbers}

_LAUNCH: Final = "mlx/_distributed_utils/launch.py"
_CONFIG: Final = "mlx/_distributed_utils/config.py"
_RING_SOURCE: Final = "mlx/distributed/ring"
_JACCL_SOURCE: Final = "mlx/distributed/jaccl"
_MLX_MODULE: Final = (
    r"(?:mlx(?:\.(?:core|nn|optimizers|utils|extension|_distributed_utils)(?:\.[\w.]{0,80})?)?"
    r"|mlx_lm(?:\.[\w.]{0,80})?)"
)
"""A module of the packages mlx and mlx-lm; mlx.data, for one, is of another package."""
_METAL_FAILED: Final = "[METAL] Command buffer execution failed: "

SIGNATURES: Final[tuple[Signature, ...]] = (
    # mlx.launch, and the shell that starts a rank.
    Signature(
        "launch.rank_exit",
        r"Node with rank (?P<rank>\d+) exited with code (?P<code>-?\d+)",
        "rank {rank} exited with code {code}",
        "read that rank's log",
        "[WARN] Node with rank 3 exited with code -15",
        Citation(_LAUNCH, Provenance.REPRODUCED),
        SignatureKind.NOISE,
    ),
    Signature(
        "launch.rank_killed",
        r"Node with rank (?P<rank>\d+) was killed",
        "mlx.launch killed rank {rank} because another one had failed",
        "find the first rank that failed",
        "[WARN] Node with rank 2 was killed",
        Citation(_LAUNCH, Provenance.SOURCE),
        SignatureKind.NOISE,
    ),
    Signature(
        "launch.remote_kill_failed",
        r"CalledProcessError: Command 'ssh (?P<host>\S{1,255}) 'pid=\$\(cat ",
        "mlx.launch could not kill the rank on {host}: it takes a wrong name for the file that holds its pid",
        "nothing: Flight Deck ends that rank itself",
        "subprocess.CalledProcessError: Command 'ssh mini-2 'pid=$(cat /tmp/tmp.ohwf); if ps -p $pid >/dev/null; then",
        Citation(f"{_LAUNCH}, mlx 0.32.4 over a real sshd", Provenance.REPRODUCED),
        SignatureKind.NOISE,
    ),
    Signature(
        "launch.python_missing",
        r"exec: (?P<command>[^/\s]\S{0,255}): (?:cannot execute: )?(?:not found|No such file)",
        "{command} is not a program on this host: since mlx 0.32.0 a script is not run by python unless it is named",
        "begin the command with the interpreter's absolute path on that node, `python` of its [[node]]",
        "/bin/bash: line 1: exec: train.py: not found",
        Citation("ml-explore/mlx#3536", Provenance.REPRODUCED),
    ),
    Signature(
        "launch.interp_missing",
        r"sh: (?:line )?\d+: (?:exec: )?(?P<path>/\S{1,1000}): (?:cannot execute: )?(?:not found|No such file)",
        "{path} does not exist on this host",
        "make the environment there, or give that [[node]] the absolute path of its interpreter as `python`",
        "/bin/bash: line 1: /opt/train/.venv/bin/python: No such file or directory",
        Citation("bash and dash under mlx.launch", Provenance.REPRODUCED),
    ),
    Signature(
        "launch.py_double",
        r"SyntaxError: source code cannot contain null bytes",
        "python was given an interpreter to run as if it were a script: mlx up to 0.31.2 adds its own python",
        "install mlx 0.32.1 or newer on every node",
        "SyntaxError: source code cannot contain null bytes",
        Citation(f"{_LAUNCH}, mlx 0.31.2", Provenance.REPRODUCED),
    ),
    Signature(
        "launch.ring_needs_ip",
        r"The ring backend requires IPs to be provided instead of hostnames",
        "a node has no IP address in the hostfile",
        "give that [[node]] its `ips`",
        "mlx.launch: error: The ring backend requires IPs to be provided instead of hostnames",
        Citation(_LAUNCH, Provenance.REPRODUCED),
    ),
    Signature(
        "launch.hostfile_rdma",
        r"(?:The hostfile is malformed: |Malformed hostfile for )(?P<why>.{1,300})",
        "mlx.launch refuses the hostfile's RDMA devices: {why}",
        "name one device for every pair of nodes and none of a node with itself; `flightdeck nodes` reads them",
        "mlx.launch: error: The hostfile is malformed: RDMA device of self should be null",
        Citation(_LAUNCH, Provenance.REPRODUCED),
    ),
    Signature(
        "launch.log_warning_nameerror",
        r"NameError: name 'log_warning' is not defined",
        "mlx.distributed_config of mlx 0.30.1 fails by itself when it wants to warn of something",
        "install mlx 0.32.1 or newer; Flight Deck writes the hostfile without that program",
        "NameError: name 'log_warning' is not defined",
        Citation("ml-explore/mlx#2944", Provenance.REPORTED),
    ),
    Signature(
        "config.domain_uuid",
        r"KeyError: 'domain_uuid_key'",
        "an older mlx.distributed_config takes a display or dock at a Thunderbolt port for a Mac",
        "install mlx 0.32.1 or newer, or unplug the display; Flight Deck reads the ports itself",
        "KeyError: 'domain_uuid_key'",
        Citation("ml-explore/mlx#2538", Provenance.REPORTED),
    ),
    Signature(
        "config.rdma_off",
        r"does not seem to have RDMA enabled|don't have RDMA enabled or they don't support RDMA",
        "a Mac has RDMA switched off, or no Thunderbolt 5",
        "start that Mac in Recovery, run `rdma_ctl enable` in its Terminal and restart; or use the ring",
        "[WARN] studio-2 does not seem to have RDMA enabled",
        Citation(_CONFIG, Provenance.SOURCE),
    ),
    Signature(
        "config.mesh",
        r"Incomplete mesh, (?P<a>\S{1,255}) is not connected to (?P<b>\S{1,255})",
        "no Thunderbolt cable joins {a} and {b}, and jaccl's mesh needs one between every two Macs",
        "add the cable, or choose jaccl-ring or ring",
        "[ERROR] Incomplete mesh, studio-1 is not connected to studio-3",
        Citation(_CONFIG, Provenance.SOURCE),
    ),
    # MLX's ring.
    Signature(
        "ring.bind",
        r"\[ring\] Couldn't bind socket \(error: (?P<errno>\d+)",
        "the ring could not listen on its port: {errno}",
        "end what holds the port (an earlier run's rank?), or correct the node's address",
        "RuntimeError: [ring] Couldn't bind socket (error: 48)",
        Citation(f"{_RING_SOURCE}, ml-explore/mlx#1903", Provenance.REPRODUCED),
        reason=Reason.LAUNCH_FAILED,
    ),
    Signature(
        "ring.connect_retry",
        r"\[ring\] Attempt (?P<number>\d+) waiting (?P<ms>\d+) ms \(error: (?P<errno>\d+)",
        "the peer does not listen yet",
        "nothing, while it happens once or twice; from the fourth time on see whether that rank has started",
        "[ring] Attempt 1 waiting 2000 ms (error: 61 )",
        Citation(_RING_SOURCE, Provenance.REPRODUCED),
        SignatureKind.NOISE,
    ),
    Signature(
        "ring.connect",
        r"\[ring\] Couldn't connect \(error: (?P<errno>\d+)",
        "the ring could not connect to a peer: {errno}",
        "see whether that peer's rank has started; if it has, check the node's address, the firewall and, on macOS, "
        "Local Network privacy (ping may work all the same)",
        "RuntimeError: [ring] Couldn't connect (error: 111)",
        Citation("ml-explore/mlx#3755, ml-explore/mlx#1903, exo-explore/exo#2309", Provenance.REPORTED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "ring.peer_lost_new",
        r"\[ring\] connection to a peer was lost",
        "the connection to a peer was lost",
        "find the rank or the link that went first",
        "RuntimeError: [ring] connection to a peer was lost",
        Citation("ml-explore/mlx#4060, mlx 0.32.1 and newer", Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "ring.peer_closed",
        r"\[ring\] Socket (?P<socket>\d+) was closed by the peer",
        "a neighbouring rank went away",
        "find the rank that went first",
        "[ring] Socket 5 was closed by the peer",
        Citation(_RING_SOURCE, Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "ring.recv_old",
        r"\[ring\] Receiving from socket (?P<socket>\d+) failed with errno (?P<errno>\d+)",
        "receiving from a neighbouring rank failed: {errno}",
        "find the rank that went first, and install mlx 0.32.1 or newer: older ones hang after this",
        "[ring] Receiving from socket 7 failed with errno 104",
        Citation("ml-explore/mlx#3862, ml-explore/mlx#4276", Provenance.REPORTED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "ring.too_many",
        r"\[ring\] Too many send/recv errors\. (?P<what>Aborting|Failing)",
        "the ring gave up after its connections failed",
        "find the rank or the link that went first",
        "[ring] Too many send/recv errors. Failing pending tasks...",
        Citation("ml-explore/mlx#3862", Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "ring.send",
        r"\[ring\] Sending to socket (?P<socket>\d+) failed with errno (?!22\b)(?P<errno>\d+)",
        "sending to a neighbouring rank failed: {errno}",
        "find the rank that went first",
        "[ring] Sending to socket 4 failed with errno 32",
        Citation(_RING_SOURCE, Provenance.SOURCE),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "ring.2gib",
        r"\[ring\] Sending to socket (?P<socket>\d+) failed with errno 22\b",
        "one message of 2 GiB or more does not go through a macOS socket",
        "install mlx 0.32.1 or newer on every node, or send smaller arrays",
        "[ring] Sending to socket 6 failed with errno 22",
        Citation("ml-explore/mlx#4280, ml-explore/mlx#4281", Provenance.REPORTED),
    ),
    Signature(
        "ring.neighbor",
        r"only supported (?:to|from) direct neighbors|In ring mode (?:send|recv) is only supported",
        "the program exchanges data with a rank that is not its neighbour in the ring",
        "order the ranks so that it is one, or use jaccl's mesh",
        "[ring] Recv only supported from direct neighbors but tried to recv from 0 to 2",
        Citation(_RING_SOURCE, Provenance.REPRODUCED),
    ),
    Signature(
        "any.no_split",
        r"\[(?P<backend>ring|jaccl)\] Group split not supported",
        "the program divides the ranks into smaller groups, and {backend} has only the one of all",
        "use one kind of parallelism at a time",
        "RuntimeError: [jaccl] Group split not supported.",
        Citation("mlx/distributed", Provenance.REPRODUCED),
    ),
    Signature(
        "ring.no_sum_scatter",
        r"\[ring\] sum_scatter not supported",
        "the ring has no sum_scatter, which mlx's own fully_shard needs",
        'use strategy = "sharded", which does without it, or jaccl',
        "RuntimeError: [ring] sum_scatter not supported.",
        Citation(_RING_SOURCE, Provenance.REPRODUCED),
    ),
    Signature(
        "dist.unavailable",
        r"Cannot initialize (?P<backend>\w{1,20}) distributed backend",
        "this MLX cannot use the {backend} backend on this host",
        "check the installed mlx and, for jaccl, macOS 26.2 and RDMA; or use the ring",
        "RuntimeError: Cannot initialize nccl distributed backend.",
        Citation("mlx/distributed", Provenance.REPRODUCED),
    ),
    # MLX's RDMA over Thunderbolt; like Metal's, these cannot be reproduced without such Macs.
    Signature(
        "jaccl.rtr22",
        r"\[jaccl\] Changing queue pair to RTR failed with errno 22\b",
        "RDMA cannot address a Thunderbolt port: it has no IPv4 address of its own, often because a bridge has it",
        "take the port out of the bridge and give it an IPv4 address of its own (`networksetup -setmanual`)",
        "RuntimeError: [jaccl] Changing queue pair to RTR failed with errno 22",
        Citation("ml-explore/mlx#3467, ml-explore/mlx#4191, exo-explore/exo#1390", Provenance.REPORTED),
    ),
    Signature(
        "jaccl.gid",
        r"\[jaccl\] No IPv4-mapped GID",
        "RDMA cannot address a Thunderbolt port: it publishes no address made from an IPv4 one",
        "take the port out of the bridge and give it an IPv4 address of its own (`networksetup -setmanual`)",
        "RuntimeError: [jaccl] No IPv4-mapped GID for this device. Thunderbolt RDMA ports only publish one once",
        Citation("ml-explore/mlx#4191, mlx 0.32.1 and newer", Provenance.SOURCE),
    ),
    Signature(
        "jaccl.rtr60",
        r"\[jaccl\] Changing queue pair to RTR failed with errno 60\b",
        "the RDMA port at the other end does not answer: the hostfile pairs the wrong ports, or that one is down",
        "compare the hostfile's devices with the cables; trying again without a change makes it worse",
        "RuntimeError: [jaccl] Changing queue pair to RTR failed with errno 60",
        Citation("ml-explore/mlx#3910, exo-explore/exo#1847", Provenance.REPORTED),
    ),
    Signature(
        "jaccl.qp16",
        r"\[jaccl\] (?:Creating the queue pair failed.{0,80}\(16\)"
        r"|Changing queue pair to \w{1,10} failed with errno 16\b)",
        "the RDMA device has no queue pair left: another program uses it, or an earlier one has not given them back",
        "end the other programs that use RDMA on that Mac; if there are none, restart it",
        "RuntimeError: [jaccl] Changing queue pair to INIT failed with errno 16",
        Citation("ml-explore/mlx#3162, ml-explore/mlx#3207, ml-explore/mlx#4209", Provenance.REPORTED),
    ),
    Signature(
        "jaccl.pd",
        r"\[jaccl\] Couldn't allocate protection domain",
        "an RDMA device could not be opened for use: its port is down, or it was opened too often since a restart",
        "name a device whose port `ibv_devinfo` calls PORT_ACTIVE; if it is one already, restart that Mac",
        "RuntimeError: [jaccl] Couldn't allocate protection domain",
        Citation("ml-explore/mlx#3910, ml-explore/mlx#3207", Provenance.REPORTED),
    ),
    Signature(
        "jaccl.nodev",
        r"\[jaccl\] Could(?: not|n't) (?:find|open) device (?P<device>rdma_\w{1,32})",
        "this Mac has no RDMA device {device} now",
        "read the devices anew with `flightdeck nodes`: their names change with restarts and cables",
        "RuntimeError: [jaccl] Could not find device rdma_en4 (2 available)",
        Citation("ml-explore/mlx#4180", Provenance.SOURCE),
    ),
    Signature(
        "jaccl.recv2",
        r"\[jaccl\] Recv failed with errno=2\b",
        "rank 0, through which the ranks find each other, went away",
        "find the rank that went first",
        "RuntimeError: [jaccl] Recv failed with errno=2",
        Citation("ml-explore/mlx#3910, exo-explore/exo#1847", Provenance.REPORTED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "jaccl.connect",
        r"\[jaccl\] Couldn't connect \(error: (?P<errno>\d+)",
        "rank 0, through which the ranks find each other over TCP, could not be reached: {errno}",
        "see whether rank 0 has started; if it has, make its first address and port reachable from every node",
        "RuntimeError: [jaccl] Couldn't connect (error: 60)",
        Citation("ml-explore/mlx#3755", Provenance.REPORTED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "jaccl.wc",
        r"\[jaccl\] (?:Send|Recv) failed with error code (?P<code>\d+)",
        "an RDMA transfer was not completed (code {code}; 12 is no answer after all repetitions)",
        "find the rank or the cable that went first",
        "RuntimeError: [jaccl] Recv failed with error code 12",
        Citation(_JACCL_SOURCE, Provenance.SOURCE),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "jaccl.mr",
        r"\[jaccl\] Register memory region failed",
        "RDMA could not take another piece of memory: a device takes about a hundred in all",
        "end the other programs that use RDMA on that Mac; if there are none, restart it",
        "RuntimeError: [jaccl] Register memory region failed",
        Citation("ml-explore/mlx#3162", Provenance.REPORTED),
    ),
    Signature(
        "jaccl.topology",
        r"should define a valid mesh or a valid ring",
        "the hostfile's RDMA devices join the Macs neither each with each nor one after the other round",
        "complete the devices in the hostfile, or use the ring",
        "RuntimeError: [jaccl] The configuration should define a valid mesh or a valid ring.",
        Citation(_JACCL_SOURCE, Provenance.SOURCE),
    ),
    # Metal, and macOS around the GPU.
    Signature(
        "metal.timeout",
        r"kIOGPUCommandBufferCallbackErrorTimeout",
        "the GPU waited some seconds inside one command buffer, as it does for a slower or dead peer, and was stopped",
        "find a rank that went first or is much slower, and give that one a smaller share; a program of your own "
        "must evaluate first and communicate on the CPU stream",
        f"{_METAL_FAILED}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
        Citation(
            "ml-explore/mlx-examples#1185, ml-explore/mlx-examples#1200, exo-explore/exo#1620", Provenance.REPORTED
        ),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "metal.interactivity",
        r"kIOGPUCommandBufferCallbackErrorImpactingInteractivity",
        "macOS stopped the GPU's work because it held up the display",
        "use a smaller batch or shorter sequences, and let that Mac's display sleep",
        f"{_METAL_FAILED}Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
        Citation("ml-explore/mlx#3267", Provenance.REPORTED),
    ),
    Signature(
        "metal.internal",
        r"Internal Error \(0000000e",
        "the GPU's driver failed inside itself",
        "use a smaller batch or shorter sequences; if it comes back, restart that Mac",
        f"{_METAL_FAILED}Internal Error (0000000e:Internal Error)",
        Citation("ml-explore/mlx#1226, ml-explore/mlx#1231", Provenance.REPORTED),
    ),
    Signature(
        "metal.oom",
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Insufficient Memory \(00000008",
        "the GPU's memory did not suffice",
        "use a smaller batch or shorter sequences, grad_checkpoint, or fewer layers; "
        "`iogpu.wired_limit_mb` sets how much of the memory the GPU may have",
        f"{_METAL_FAILED}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        Citation("ml-explore/mlx-lm#236", Provenance.REPORTED),
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "metal.malloc",
        r"\[(?:metal::)?malloc\] (?:Unable to allocate|Attempting to allocate|Resource limit)",
        "one array was larger than Metal gives out at once, or there were too many of them",
        "use shorter sequences or a smaller batch",
        "RuntimeError: [metal::malloc] Resource limit (499000) exceeded.",
        Citation("mlx/backend/metal/allocator.cpp", Provenance.SOURCE),
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "os.watchdog_panic",
        r"no (?:successful )?checkins from (?:watchdogd|WindowServer)",
        "macOS restarted the Mac: long work on the GPU left its watchdog without a sign of life",
        "use a smaller batch or shorter sequences, and let that Mac's display sleep",
        "panic: watchdog timeout: no checkins from WindowServer in 120 seconds",
        Citation("ml-explore/mlx#3267", Provenance.REPORTED),
    ),
    Signature(
        "os.iogpu_panic",
        r"completeMemory\(\) prepare count underflow",
        "macOS stopped with a fault in its GPU driver, as happens when memory is nearly used up",
        "bring macOS up to date, and leave more memory free: a smaller batch, no other large programs",
        "panic: IOGPUMemory::completeMemory() prepare count underflow",
        Citation("ml-explore/mlx#3186", Provenance.REPORTED),
    ),
    # mlx-lm and Python's imports.
    Signature(
        "lora.batch_div",
        r"The batch size must be divisible by the number of workers",
        "the global batch does not divide by the number of ranks",
        "choose a batch_size that does",
        "ValueError: The batch size must be divisible by the number of workers",
        Citation("mlx_lm/tuner/trainer.py", Provenance.REPRODUCED),
    ),
    Signature(
        "lora.dataset_small",
        r"Dataset must have at least batch_size=(?P<batch>\d+) examples but only has (?P<examples>\d+)",
        "the data set has {examples} examples, fewer than the batch of {batch}",
        "use a smaller batch_size, or more data",
        "ValueError: Dataset must have at least batch_size=32 examples but only has 20.",
        Citation("mlx_lm/tuner/trainer.py", Provenance.REPRODUCED),
    ),
    Signature(
        "lora.layers",
        r"Requested to train (?P<wanted>\d+) layers but the model only has (?P<layers>\d+) layers",
        "num_layers is {wanted}, and the model has {layers} layers",
        "set num_layers to -1 (all) or at most {layers}; unset it is 16",
        "ValueError: Requested to train 16 layers but the model only has 6 layers.",
        Citation("mlx_lm/lora.py", Provenance.REPRODUCED),
    ),
    Signature(
        "lora.no_train",
        r"Training set not found or empty",
        "no training data was found on this host",
        "check `data`: it needs a train.jsonl on every node",
        "ValueError: Training set not found or empty. Must provide training set for fine-tuning.",
        Citation("mlx_lm/tuner/datasets.py", Provenance.REPRODUCED),
    ),
    Signature(
        "lora.quantized",
        r"\[(?:QuantizedMatmul|GatherQMM)::vjp\] no gradient wrt the quantized weights",
        "the model is quantized, and MLX has no gradients for quantized weights",
        "set fine_tune_type to lora, or use the unquantized model",
        "RuntimeError: [GatherQMM::vjp] no gradient wrt the quantized weights.",
        Citation("full fine-tuning of a quantized model, mlx 0.32.4", Provenance.REPRODUCED),
    ),
    Signature(
        "hf.offline",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled",
        "the model is not on this host, and runs do not download",
        "copy the model there and name it by its path",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache",
        Citation("huggingface_hub", Provenance.REPRODUCED),
    ),
    Signature(
        "hf.repoid",
        r"HFValidationError: Repo id must",
        "the model's directory does not exist on this host, so its path was taken for a name on the Hugging Face Hub",
        "copy the model there, or correct `model`",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name'",
        Citation("huggingface_hub", Provenance.REPRODUCED),
    ),
    Signature(
        "import.mlx",
        rf"ModuleNotFoundError: No module named '(?P<module>{_MLX_MODULE})'",
        "{module} is not installed in this host's environment: it is another one than on the other hosts",
        "install the same mlx and mlx-lm on every node, from the same lock file",
        "ModuleNotFoundError: No module named 'mlx.core'",
        Citation("Python", Provenance.ASSUMED),
    ),
    Signature(
        "import.mlx_distributed",
        r"ModuleNotFoundError: No module named '(?P<module>mlx\.distributed)(?:\.[\w.]{0,80})?'",
        "the program imports {module}, which is no module: it is an attribute of mlx.core",
        "write `import mlx.core as mx` and `mx.distributed`",
        "ModuleNotFoundError: No module named 'mlx.distributed'",
        Citation("Python with mlx 0.32.4", Provenance.REPRODUCED),
    ),
    Signature(
        "import.other",
        rf"ModuleNotFoundError: No module named '(?P<module>(?!{_MLX_MODULE}'|mlx\.distributed['.])[\w.]{{1,100}})'",
        "the Python module {module} is missing on this host",
        "install it in that node's environment",
        "ModuleNotFoundError: No module named 'datasets'",
        Citation("Python", Provenance.REPRODUCED),
    ),
    # ssh and the operating system.
    Signature(
        "memory.python",
        r"\bMemoryError\b|std::bad_alloc|[Cc]annot allocate memory|[Oo]ut of memory(?!: Killed)",
        "there was not enough memory",
        "use a smaller batch or shorter sequences, or grad_checkpoint",
        "numpy.core._exceptions._ArrayMemoryError: MemoryError: Unable to allocate 7.45 GiB",
        Citation("Python, C++, errno(3)", Provenance.REPRODUCED),
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "memory.killed",
        r"[Oo]ut of memory: Killed process|oom-kill",
        "the operating system killed the rank for want of memory",
        "use a smaller batch or shorter sequences, grad_checkpoint, or end other programs on that node",
        "Out of memory: Killed process 4711 (python3) total-vm:68719476kB",
        Citation("Linux", Provenance.SOURCE),
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "disk.full",
        r"No space left on device|Errno 28\b|Disk quota exceeded|names an empty file: the disk of",
        "the disk was full",
        "make room where the checkpoints and logs lie, then launch again",
        "OSError: [Errno 28] No space left on device: 'adapters/0000100_adapters.safetensors'",
        Citation("errno(3)", Provenance.REPRODUCED),
        reason=Reason.DISK_FULL,
    ),
    Signature(
        "disk.no_temporary_files",
        r"names no file: temporary files cannot be made|No usable temporary directory found in",
        "temporary files could not be made",
        "on that node, see that the folder of TMPDIR is there and may be written, and that its disk has room",
        "FileNotFoundError: [Errno 2] No usable temporary directory found in ['/Volumes/scratch', '/tmp', '/var/tmp']",
        Citation("Python's tempfile, our start.sh", Provenance.REPRODUCED),
    ),
    Signature(
        "disk.read_only",
        r"Read-only file system",
        "the file system cannot be written to",
        "write to another place, or mount it writable",
        "OSError: [Errno 30] Read-only file system: '/Volumes/models/adapters'",
        Citation("errno(3)", Provenance.ASSUMED),
    ),
    Signature(
        "os.full_disk_access",
        r"Operation not permitted: '(?P<path>/(?:Users/[^/']{1,255}/(?:Documents|Desktop|Downloads|Library/Mobile Doc"
        r"uments)|Volumes)/[^']{0,1000})",
        "macOS does not let a program that came over ssh read {path}",
        "in System Settings, General, Sharing, Remote Login of that Mac: allow full disk access for remote users; "
        "or move the files out of Documents, Desktop and Downloads",
        "PermissionError: [Errno 1] Operation not permitted: '/Users/ana/Documents/data/train.jsonl'",
        Citation("Apple, Mac User Guide: Allow a remote computer to access your Mac", Provenance.SOURCE),
    ),
    Signature(
        "ssh.refused",
        r"ssh: connect to host (?P<host>\S{1,255}) port (?P<port>\d{1,5}): (?P<why>.{1,120})",
        "{host} does not take ssh on port {port}: {why}",
        "switch Remote Login on there, or correct the node's `ssh` address",
        "ssh: connect to host mini-3.local port 22: Operation timed out",
        Citation("ssh; mlx.launch hides it by LogLevel=QUIET", Provenance.SOURCE),
    ),
    Signature(
        "ssh.denied",
        r"Permission denied \((?:publickey|password|keyboard-interactive)",
        "the node refused our ssh key",
        "add this machine's key to the node's authorized_keys",
        "trainer@mini-3: Permission denied (publickey,password,keyboard-interactive).",
        Citation("ssh", Provenance.REPRODUCED),
    ),
    Signature(
        "ssh.host_key",
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the node's host key is not the known one",
        "find out why before you trust it",
        "Host key verification failed.",
        Citation("ssh", Provenance.REPRODUCED),
    ),
)
"""No text is known by two of them."""

BY_ID: Final = {signature.id: signature for signature in SIGNATURES}
