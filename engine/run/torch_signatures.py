"""The known texts of failures of PyTorch jobs: torch and its process groups (NCCL, gloo), torchelastic, Accelerate,
DeepSpeed, transformers and peft. Those that need a GPU cannot be reproduced on a CPU build: they are from the source,
or from what others report.
"""

from __future__ import annotations

from typing import Final

from engine.models import Reason
from engine.run.signature import Citation, Provenance, Signature, SignatureKind

TORCH_MODULE: Final = r"(?:torch|accelerate|deepspeed|peft|transformers|safetensors)(?:\.[\w.]{0,80})?"
_MODULE_MISSING: Final = r"ModuleNotFoundError: No module named '(?P<module>"
_TORCH: Final = "torch 2.13.0"
_DEEPSPEED: Final = "deepspeed 0.19.8"
_TRANSFORMERS: Final = "transformers 5.23.0"
_LESS_MEMORY: Final = "use a smaller batch or shorter sequences, grad_checkpoint, or a strategy that shards more (fsdp)"

TORCH_SIGNATURES: Final[tuple[Signature, ...]] = (
    # The store through which the ranks find each other.
    Signature(
        "c10d.port_in_use",
        r"The server socket has failed to listen on .{1,60}port: (?P<port>\d+).{1,60}EADDRINUSE",
        "rank 0 could not listen on MASTER_PORT {port}: another program has it, perhaps an earlier run's rank",
        "end what holds the port, or let Flight Deck choose it: set no MASTER_PORT in [job.env] nor in the command",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        Citation(_TORCH, Provenance.REPRODUCED),
        reason=Reason.LAUNCH_FAILED,
    ),
    Signature(
        "c10d.foreign_store",
        r"Ping failed, invalid value returned from server",
        "what listens at MASTER_ADDR and MASTER_PORT is no rank 0: another program, or a proxy, answered",
        "end the program that has this port on rank 0's node, and take proxies out of the way between the nodes",
        "torch.distributed.DistNetworkError: Ping failed, invalid value returned from server. Expected: 12, Got: 13",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "c10d.store_unreachable",
        r"DistNetworkError: The client socket has timed out after \d+ms while trying to connect to "
        r"\((?P<host>[^,\s]{1,255}), (?P<port>\d+)\)",
        "rank 0's store at {host}:{port} did not answer",
        "see whether rank 0 has started; if it has, make {host} reachable from this node: its name, firewall, port",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to "
        "(gpu-1, 29500).",
        Citation(_TORCH, Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "c10d.clients_missing",
        r"Timed out after \d+ seconds waiting for clients\. (?P<came>\d+)/(?P<all>\d+) clients joined",
        "only {came} of {all} ranks came to rank 0's store in time",
        "find the rank that did not start, or cannot reach rank 0's node",
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
        Citation(_TORCH, Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "c10d.store_wait",
        r"DistStoreError: wait timeout after \d+ms, keys: (?P<keys>.{1,120})",
        "another rank did not come to where this one waited for it",
        "find the rank that went first, or does something else at this point of the program",
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1",
        Citation(_TORCH, Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "c10d.store_gone",
        r"(?:DistNetworkError|DistStoreError): (?:Broken pipe|Connection reset by peer|Failed to recv)",
        "rank 0, whose store the ranks share, went away",
        "find out why rank 0 ended",
        "torch.distributed.DistNetworkError: Broken pipe",
        Citation(_TORCH, Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "c10d.no_environment",
        r"using env:// rendezvous: environment variable (?P<name>\w{1,40}) expected, but not set",
        "the program has no {name}: something between Flight Deck and the program took it from the environment",
        "start the program without env -i, sudo or another launcher in between, or hand {name} on",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR "
        "expected, but not set",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "c10d.not_initialised",
        r"Default process group has not been initialized",
        "the program uses collectives before init_process_group, or after destroy_process_group",
        "call torch.distributed.init_process_group first",
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "c10d.collectives_differ",
        r"Detected mismatch between collectives on ranks|op\.preamble\.length <= op\.nbytes",
        "the ranks did not call the same collective with equal shapes at the same time",
        "look for code that only some ranks run (if rank == 0, an early break, data of unequal length); "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the two",
        "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 800 vs 4. "
        "Received data size doesn't match expected size.",
        Citation(f"{_TORCH} with gloo", Provenance.REPRODUCED),
    ),
    Signature(
        "c10d.no_address_family",
        r"The IPv[46] network addresses of \(.{1,255}\) cannot be retrieved|errno: 97 - Address family not supported",
        "a name has no address of this family, or this host no IPv6: torch goes on with the other one",
        "nothing, if the ranks find each other; else make the name of rank 0's node known here",
        "[W1125 10:57:13.074 socket.cpp:764] [c10d] The IPv6 network addresses of (gpu-1, 29500) cannot be retrieved "
        "(gai error: -2 - Name or service not known).",
        Citation(_TORCH, Provenance.REPRODUCED),
        SignatureKind.NOISE,
    ),
    # gloo.
    Signature(
        "gloo.peer_closed",
        r"Connection closed by peer \[|(?:Read|Write) error \[[^\]]{1,64}\]:\d+: ",
        "another rank went away",
        "find the rank that went first",
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:35030. This is typically "
        "caused by a remote worker crashing.",
        Citation(f"{_TORCH} with gloo", Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "gloo.timeout",
        r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send) operation to complete",
        "another rank did not take part in a collective for {ms} ms",
        "find the rank that hangs, is much slower, or left the loop early",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to "
        "complete",
        Citation(f"{_TORCH} with gloo", Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "gloo.connect",
        r"Gloo connectFullMesh failed with|"
        r"connect \[[^\]]{1,64}\]:\d+: (?:Connection refused|No route to host|Connection timed)",
        "gloo could not connect to another rank",
        "see whether that rank has started; if it has, name the interface that reaches it (GLOO_SOCKET_IFNAME) and "
        "open the firewall between the nodes for every port",
        "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
        Citation(f"{_TORCH} with gloo, gpustack/gpustack#2125, pytorch/pytorch#108732", Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "gloo.no_interface",
        r"Unable to find address for: (?P<interface>\S{1,64})",
        "this host has no interface {interface} with an address",
        "correct GLOO_SOCKET_IFNAME or the node's `interface`: `flightdeck nodes` lists the interfaces",
        "RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: "
        "en99",
        Citation(f"{_TORCH} with gloo", Provenance.REPRODUCED),
    ),
    Signature(
        "gloo.barrier",
        r"Rank (?P<rank>\d+) failed to pass monitoredBarrier in (?P<ms>\d+) ms",
        "rank {rank} did not come to the barrier within {ms} ms",
        "find out what rank {rank} did meanwhile",
        "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        Citation(f"{_TORCH} with gloo", Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    # NCCL.
    Signature(
        "nccl.no_gpu",
        r"ProcessGroupNCCL is only supported with GPUs",
        "the nccl backend was asked for, and torch sees no GPU on this host",
        'see `nvidia-smi` and CUDA_VISIBLE_DEVICES there; without GPUs use backend = "gloo"',
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        Citation("torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp", Provenance.SOURCE),
    ),
    Signature(
        "nccl.not_built",
        r"Distributed package doesn't have NCCL built in",
        "this torch is a build without CUDA: it has no nccl",
        'install the CUDA build of torch on that node, or use backend = "gloo"',
        "RuntimeError: Distributed package doesn't have NCCL built in",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "nccl.timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(?P<operation>\w{1,40})",
        "a collective ({operation}) was not finished in time: another rank did not take part, or the network failed",
        "find the rank that ended, hangs, or left the loop early; if none did, see the interface and InfiniBand "
        "(NCCL_DEBUG=INFO)",
        "[rank0]:[E321 02:07:08.408 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600060 milliseconds",
        Citation("pytorch/pytorch#118369", Provenance.REPORTED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "nccl.watchdog_stuck",
        r"ProcessGroupNCCL's watchdog got stuck for \d+ seconds|due to ProcessGroupNCCL watchdog hang",
        "NCCL or CUDA did not return: torch ended this rank, as its watchdog could not look after the collectives",
        "find the rank that failed or hung first; if none did, see the driver and NCCL_DEBUG=INFO, or give it longer "
        "(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC)",
        "[rank2]:[E704 13:48:58.260494728 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank 2] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
        "collectives.",
        Citation("torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp", Provenance.SOURCE),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "nccl.peer_lost",
        r"ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
        r"|remote process exited or there was a network error",
        "another rank went away, or the network to it",
        "find the rank that went first; if none did, the network between the nodes",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
        "remote process exited or there was a network error, NCCL version 2.21.5",
        Citation("NVIDIA/nccl#2076, NVIDIA/nccl#934", Provenance.REPORTED),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "nccl.system_error",
        r"ncclSystemError: System call \(",
        "NCCL could not use a socket, shared memory or a device of this host",
        "name the interface that joins the nodes (NCCL_SOCKET_IFNAME); see /dev/shm, `ulimit -l` and NCCL_DEBUG=WARN",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        Citation("NVIDIA/nccl#697, NVIDIA/nccl#834", Provenance.REPORTED),
    ),
    Signature(
        "nccl.no_interface",
        r"(?i:no socket interface found)|connecting to address {1,2}with family \d+ is neither AF_INET",
        "NCCL found no interface of the name that NCCL_SOCKET_IFNAME gives",
        "correct NCCL_SOCKET_IFNAME or the node's `interface`: `flightdeck nodes` lists the interfaces",
        "gpu-1:1958:1958 [3] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
        Citation("NVIDIA/nccl#1837", Provenance.REPORTED),
    ),
    Signature(
        "nccl.same_gpu",
        r"Duplicate GPU detected : rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device",
        "ranks {a} and {b} use the same GPU",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else, and no more `processes` than GPUs",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000",
        Citation("verl-project/verl#161", Provenance.REPORTED),
    ),
    Signature(
        "nccl.versions_differ",
        r"Mismatched NCCL version detected : rank (?P<a>\d+) version (?P<one>\d+) "
        r"rank (?P<b>\d+) version (?P<other>\d+)",
        "ranks {a} and {b} have different versions of NCCL: {one} and {other}",
        "install the same torch on every node, from the same lock file, and set no LD_LIBRARY_PATH or LD_PRELOAD to "
        "another libnccl",
        "gpu-1:1958:1958 [0] init.cc:790 NCCL WARN Mismatched NCCL version detected : rank 1 version 22705 rank 0 "
        "version 22703",
        Citation("NVIDIA/nccl src/init.cc", Provenance.SOURCE),
    ),
    Signature(
        "nccl.invalid_usage",
        # Not where NCCL's own words, which torch prints below, are known.
        r"ncclInvalidUsage: This usually reflects invalid usage of NCCL library"
        r"(?!.{0,200}\nLast error: ?\n(?:Duplicate GPU|Mismatched NCCL version) detected)",
        "NCCL refused the call: the ranks' devices, environment or calls do not fit together",
        "read the lines below it (Last error) or NCCL_DEBUG=WARN; most often two ranks use one GPU, or NCCL_* names a "
        "network that this host does not have",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        Citation("torch/csrc/distributed/c10d/NCCLUtils.cpp, NVIDIA/nccl#1241", Provenance.REPORTED),
    ),
    # CUDA and its driver.
    Signature(
        "cuda.oom",
        r"CUDA out of memory|CUDA error: out of memory",
        "the GPU's memory did not suffice",
        _LESS_MEMORY,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of "
        "1.96 GiB of which 9.00 MiB is free.",
        Citation("pytorch/pytorch#59778", Provenance.REPORTED),
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "cuda.not_built",
        r"Torch not compiled with CUDA enabled|module 'torch\._C' has no attribute '_cuda_\w{1,40}'",
        "this torch is a build without CUDA, and the program wants a GPU",
        "install the CUDA build of torch on that node, or call torch.cuda.set_device only where a GPU is available",
        "AssertionError: Torch not compiled with CUDA enabled",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "cuda.no_driver",
        r"RuntimeError: Found no NVIDIA driver on your system|RuntimeError: No CUDA GPUs are available",
        "torch finds no NVIDIA driver, or no GPU, on this host",
        "see `nvidia-smi` and CUDA_VISIBLE_DEVICES there; in a container, hand the GPUs on to it",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        Citation("facebookresearch/pytorch3d#1259", Provenance.REPORTED),
    ),
    Signature(
        "cuda.old_driver",
        r"Error: The NVIDIA driver on your system is too old \(found version (?P<version>\d+)\)"
        r"|CUDA driver version is insufficient for CUDA runtime version",
        "the NVIDIA driver is older than the CUDA that this torch was built for",
        "update the driver of that node, or install a torch built for its CUDA (`nvidia-smi` shows the version)",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        Citation("RangiLyu/nanodet#216, lllyasviel/Fooocus#1313", Provenance.REPORTED),
    ),
    Signature(
        "cuda.no_library",
        r"(?:ImportError|OSError): (?P<library>lib(?:cu|nv|nccl|torch|c10)[\w.-]{1,60}): "
        r"cannot open shared object file",
        "{library} is not on this host: what was installed is built for another CUDA, or another torch, than is there",
        "install torch and its extensions for one version of CUDA, from the same lock file, on every node",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        Citation("glibc elf/dl-load.c, pytorch/pytorch#131284", Provenance.REPORTED),
    ),
    Signature(
        "cuda.no_kernel",
        r"no kernel image is available for execution on the device",
        "this torch, or one of its extensions, was not built for this generation of GPU",
        "install a torch that supports it (`torch.cuda.get_arch_list()`), and build extensions anew",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        Citation("vllm-project/vllm#18835, Comfy-Org/ComfyUI#10326", Provenance.REPORTED),
    ),
    Signature(
        "cuda.device_ordinal",
        r"CUDA error: invalid device ordinal",
        "this node has fewer GPUs than ranks, or CUDA_VISIBLE_DEVICES hides some",
        "set the node's `processes` to its number of GPUs",
        "RuntimeError: CUDA error: invalid device ordinal",
        Citation("tatsu-lab/stanford_alpaca#67, yunqing-me/WatermarkDM#8", Provenance.REPORTED),
    ),
    Signature(
        "cuda.assert",
        r"CUDA error: device-side assert triggered",
        "a kernel found an index out of range: often a token outside the vocabulary, or a label outside the classes",
        "compare the tokenizer's size with the model's vocab_size; CUDA_LAUNCH_BLOCKING=1, or one step on the CPU, "
        "names the place",
        "RuntimeError: CUDA error: device-side assert triggered",
        Citation("pytorch/pytorch#74079", Provenance.REPORTED),
    ),
    Signature(
        "cuda.ecc",
        r"CUDA error: uncorrectable ECC error encountered",
        "the GPU's memory is faulty",
        "reset the GPU or restart that node; if it comes back, have the GPU replaced and leave the node out",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        Citation("vllm-project/vllm#5222", Provenance.REPORTED),
    ),
    # torch itself, DDP and FSDP.
    Signature(
        "torch.other_build",
        r"(?P<file>[^/\s:]{1,120}\.so): undefined symbol: _Z[A-Z]{1,4}(?:3c10|2at|5torch)\w",
        "{file}, an extension of torch, was built for another version of torch than this host has",
        "build or install it anew for this torch (pip install --no-build-isolation --force-reinstall), on every node",
        "ImportError: /opt/train/lib/python3.11/site-packages/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: "
        "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_string",
        Citation("facebookresearch/maskrcnn-benchmark#421, rusty1s/pytorch_cluster#100", Provenance.REPORTED),
    ),
    Signature(
        "torch.old_system",
        r"(?:ImportError|OSError): (?P<library>\S{1,300}): version `(?P<version>\w{1,20}_[\d.]{1,12})' not found",
        "{library} has no {version}: what was installed is built for a newer system than this host's",
        "install a release that is built for this system (an older one, or from source), or use a newer system or a "
        "container there",
        "OSError: /lib64/libm.so.6: version `GLIBC_2.29' not found (required by /opt/train/lib/python3.11/"
        "site-packages/libpyg.so)",
        Citation("glibc elf/dl-version.c, pyg-team/pyg-lib#266", Provenance.REPORTED),
    ),
    Signature(
        "torch.cpu_oom",
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<bytes>\d+) bytes",
        "there was not enough memory on this host: {bytes} bytes more were wanted",
        _LESS_MEMORY,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)",
        Citation(_TORCH, Provenance.REPRODUCED),
        reason=Reason.OUT_OF_MEMORY,
    ),
    Signature(
        "torch.shared_memory",
        r"unable to allocate shared memory\(shm\)|insufficient shared memory \(shm\)",
        "the shared memory of this host (/dev/shm) is full, or small as in a container",
        "give the container more (--shm-size, or an emptyDir of medium Memory), or load data with num_workers = 0",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_29462_3361827339_0>: No space left on "
        "device (28)",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "torch.loader_killed",
        r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]{1,100})\) (?:is killed by signal|exited unexpectedly)",
        "a process that loads data (pid {pids}) was killed or crashed, most often for want of memory",
        "use fewer num_workers or less prefetching; see the kernel's log of that node for an out-of-memory kill",
        "RuntimeError: DataLoader worker (pid 27590) is killed by signal: Killed. ",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "torch.shape_mismatch",
        r"size mismatch for (?P<parameter>[\w.]{1,200}): copying a param with shape",
        "{parameter} has another shape in the checkpoint than in the model: it is of another model or configuration",
        "resume with the model, rank and layers of that run, or name its own checkpoint",
        "\tsize mismatch for weight: copying a param with shape torch.Size([2, 4]) from checkpoint, the shape in "
        "current model is torch.Size([2, 3]).",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "torch.damaged_checkpoint",
        r"PytorchStreamReader failed (?:reading|locating)|SafetensorError: Error while deserializing header",
        "a file of weights is cut off, or no such file: a copy that was not finished, or a Git LFS pointer",
        "copy it again and compare its size with the source",
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too small",
        Citation(f"{_TORCH}, safetensors 0.8.0", Provenance.REPRODUCED),
    ),
    Signature(
        "torch.weights_only",
        r"UnpicklingError: Weights only load failed",
        "the checkpoint holds Python objects, which torch.load does not load by default since 2.6",
        "if you trust the file, load it with weights_only=False, or allow its classes by add_safe_globals",
        "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "torch.not_finite",
        r"for gradients from `parameters` is non-finite",
        "a gradient is not a finite number: the training diverged, or a batch has broken values",
        "lower the learning rate, warm up longer, or use bf16 instead of fp16; look at the batch of that step",
        "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be "
        "clipped.",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "torch.fp16_gradients",
        r"Attempting to unscale FP16 gradients",
        "the trained parameters are fp16, and scaling wants them in fp32",
        "load the model in float32 (or bf16 without scaling) and leave fp16 to autocast",
        "ValueError: Attempting to unscale FP16 gradients.",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "torch.no_gradient",
        r"element \d+ of tensors does not require grad and does not have a grad_fn",
        "the loss depends on no parameter that is trained",
        "see that some parameter has requires_grad; with lora and activation checkpointing call "
        "model.enable_input_require_grads()",
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "ddp.unused_parameters",
        r"Expected to have finished reduction in the prior iteration before starting a new one",
        "some parameters took no part in the loss, and DDP waits for their gradients",
        "freeze what is not trained, or pass find_unused_parameters=True to DistributedDataParallel",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "ddp.ready_twice",
        r"Expected to mark a variable ready only once",
        "a parameter is used twice in one backward pass under reentrant checkpointing",
        "checkpoint with use_reentrant=False, or turn find_unused_parameters off",
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "ddp.models_differ",
        r"DDP expects same model across all ranks|appears not to match sizes of the same param in process",
        "the ranks built different models",
        "give every node the same configuration, code and model files: preflight compares them",
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has "
        "inconsistent 4 params.",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "fsdp.mixed_tensors",
        r"got mixed torch\.Tensor and DTensor",
        "the program mixes sharded parameters (DTensor) with plain tensors",
        "call the model through its forward, make the optimizer after fully_shard, and use DTensor's full_tensor()",
        "RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    # torchelastic: its agent reports its workers, whose own output stands before.
    Signature(
        "elastic.worker_killed",
        r"failed \(exitcode: -9\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)",
        "the worker of local rank {rank} was killed (signal 9), as the system does when memory runs out",
        "see that node's kernel log; use a smaller batch, a strategy that shards more, or end other programs there",
        "E1125 11:02:50.177000 19755 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) "
        "local_rank: 1 (pid: 19894) of binary: /opt/train/bin/python",
        Citation(_TORCH, Provenance.REPRODUCED),
    ),
    Signature(
        "elastic.child_failed",
        r"ChildFailedError:",
        "a worker of torchrun failed; its own output stands before this",
        "read the worker's own output; with @record on its main function, torchrun quotes it",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        Citation(_TORCH, Provenance.REPRODUCED),
        SignatureKind.NOISE,
    ),
    Signature(
        "elastic.signal",
        r"SignalException: Process \d+ got signal: (?P<signal>\d+)",
        "torchrun was ended from outside by signal {signal}",
        "find out what ended it, or which rank failed before",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15",
        Citation("torch/distributed/elastic/multiprocessing/api.py", Provenance.SOURCE),
        SignatureKind.CONSEQUENCE,
    ),
    Signature(
        "elastic.rendezvous",
        r"Rendezvous(?:Timeout|Connection|Closed|State)Error",
        "torchrun's agents did not find each other in time",
        "see whether every node has started, reaches rank 0's node on the rendezvous port, and has the same version "
        "of torch",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has "
        "failed.",
        Citation(_TORCH, Provenance.REPRODUCED),
        SignatureKind.CONSEQUENCE,
    ),
    # DeepSpeed.
    Signature(
        "deepspeed.batch",
        r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size (?P<sizes>.{1,80})",
        "DeepSpeed's three batch sizes contradict each other: {sizes}",
        "leave train_batch_size out of ds_config.json, or make it micro batch x accumulation x ranks",
        "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
        "gradient_acc_step * world_size 10 != 2 * 2 * 1",
        Citation(_DEEPSPEED, Provenance.REPRODUCED),
    ),
    Signature(
        "deepspeed.compile",
        r"CUDA_HOME does not exist, unable to compile|Unable to JIT load the \w{1,40} op due to"
        r"|Ninja is required to load C\+\+ extensions"
        r"|DeepSpeed Op Builder: Installed CUDA version .{1,40} does not match",
        "DeepSpeed compiles this operation on the node, and something for that is missing: nvcc, ninja, or the CUDA "
        "that torch was built with",
        "install that CUDA toolkit (set CUDA_HOME) and ninja there, or take torch's optimizer and no NVMe offload; "
        "`ds_report` shows what works",
        "deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)",
        Citation(_DEEPSPEED, Provenance.REPRODUCED),
    ),
    Signature(
        "deepspeed.world_size",
        r"The checkpoint being loaded used a DP world size of (?P<then>\d+) but the current world size is (?P<now>\d+)",
        "the ZeRO checkpoint is of {then} ranks, and this run has {now}",
        "let the script that wrote it convert it (deepspeed.checkpoint.ds_to_universal, load_universal), or use {then} "
        "ranks; the built-in fine-tuning converts its own",
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 1 but "
        "the current world size is 2.",
        Citation(_DEEPSPEED, Provenance.REPRODUCED),
    ),
    Signature(
        "deepspeed.loss_scale",
        r"Current loss scale already at minimum",
        "fp16 overflows in every step, even at the smallest loss scale",
        'use precision = "bf16" where the GPU has it (Ampere and newer), or a lower learning rate',
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        Citation(f"{_DEEPSPEED}, ymcui/Chinese-LLaMA-Alpaca#534", Provenance.REPRODUCED),
    ),
    # transformers, peft and Accelerate.
    Signature(
        "transformers.model_type",
        r"has model type `(?P<type>[\w.-]{1,80})` but Transformers does not recognize this architecture",
        "this transformers does not know the model type {type}",
        "install a newer transformers on every node, or correct model_type in config.json",
        "ValueError: The checkpoint you are trying to load has model type `nosuch` but Transformers does not recognize "
        "this architecture.",
        Citation(_TRANSFORMERS, Provenance.REPRODUCED),
    ),
    Signature(
        "transformers.no_weights",
        r"Error no file named .{1,120} found in directory (?P<folder>\S{1,1000}[^\s.])",
        "{folder} has no weights",
        "copy the model there whole",
        "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory /models/llama.",
        Citation(_TRANSFORMERS, Provenance.REPRODUCED),
    ),
    Signature(
        "transformers.chat_template",
        r"tokenizer\.chat_template is not set",
        "the data are chats, and the model's tokenizer has no chat template",
        "use the instruct model, set tokenizer.chat_template, or bring the data as prompt and completion",
        "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and no template "
        "argument was passed!",
        Citation(_TRANSFORMERS, Provenance.REPRODUCED),
    ),
    Signature(
        "transformers.pad_token",
        r"Asking to pad but the tokenizer does not have a padding token",
        "the tokenizer has no padding token",
        "set tokenizer.pad_token = tokenizer.eos_token",
        "ValueError: Asking to pad but the tokenizer does not have a padding token.",
        Citation(_TRANSFORMERS, Provenance.REPRODUCED),
    ),
    Signature(
        "transformers.bf16",
        r"Your setup doesn't support bf16/gpu|bf16 mixed precision requires PyTorch",
        "bf16 was asked for, and this device does not have it",
        'use fp16 before Ampere (V100, P100, T4), or precision = "fp32"',
        "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want to train on CPU.",
        Citation(f"{_TRANSFORMERS}, accelerate 1.15.0", Provenance.REPRODUCED),
    ),
    Signature(
        "transformers.requires",
        r"ImportError: (?:Using the `Trainer` with `PyTorch` requires|FlashAttention\d has been toggled on, but)",
        "an optional package that the program asks for is missing",
        "install it on every node (the line names it), or choose another attn_implementation",
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error",
        Citation(_TRANSFORMERS, Provenance.REPRODUCED),
    ),
    Signature(
        "peft.targets",
        r"Target modules \{?(?P<modules>[^}]{1,200})\}? not found in the base model|Please specify `target_modules`",
        "lora's target modules {modules} are not layers of this model",
        "name layers of this model as lora keys (print(model) lists them)",
        "ValueError: Target modules {'c_attn'} not found in the base model. Please check the target modules",
        Citation("peft 0.21.2", Provenance.REPRODUCED),
    ),
    Signature(
        "import.torch",
        rf"{_MODULE_MISSING}{TORCH_MODULE})'",
        "{module} is not installed in this node's environment: perhaps it is another one than on the other nodes",
        "install the same packages on every node, from the same lock file, and name that python in its [[node]]",
        "ModuleNotFoundError: No module named 'deepspeed'",
        Citation("Python", Provenance.REPRODUCED),
    ),
)
