"""The known texts of failures of CUDA under PyTorch and MLX, and of MLX's own NCCL: most are from the source."""

from __future__ import annotations

from typing import Final

from engine.failures.signature import Citation, Provenance, Signature, SignatureKind
from engine.models import Reason

_CUDA: Final = r"(?:CUDA error: |\bcu\w{1,60}\(.{0,300}\) failed: |CUDA error \S{1,300}:\d+ ')"
"""Before CUDA's own text: by torch, by MLX, and by MLX's NCCL."""
_ILLEGAL: Final = r"(?:an illegal memory access was encountered|misaligned address|unspecified launch failure)"
_MLX: Final = "mlx/backend/cuda"
_NCCL: Final = "mlx/distributed/nccl/nccl.cpp"

CUDA_SIGNATURES: Final[tuple[Signature, ...]] = (
    Signature("cuda.oom", rf"CUDA out of memory|{_CUDA}out of memory",
        "the GPU's memory did not suffice",
        "use a smaller batch or shorter sequences, grad_checkpoint, or a strategy that shards more (fsdp, sharded)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of",
        Citation(f"pytorch/pytorch#59778, {_MLX}/allocator.cpp", Provenance.REPORTED), reason=Reason.OUT_OF_MEMORY),
    Signature("cuda.not_built",
        r"Torch not compiled with CUDA enabled|module 'torch\._C' has no attribute '_cuda_\w{1,40}'",
        "this torch is a build without CUDA, and the program wants a GPU",
        "install the CUDA build of torch on that node, or call torch.cuda.set_device only where a GPU is available",
        "AssertionError: Torch not compiled with CUDA enabled",
        Citation("torch 2.13.0", Provenance.REPRODUCED)),
    Signature("cuda.no_driver",
        r"RuntimeError: Found no NVIDIA driver on your system|RuntimeError: No CUDA GPUs are available"
        rf"|(?:ImportError|OSError): libcuda\.so[\w.]{{0,9}}: cannot open|{_CUDA}no CUDA-capable device is detected",
        "torch or MLX finds no NVIDIA driver, or no GPU, on this host",
        "see `nvidia-smi` and CUDA_VISIBLE_DEVICES there; in a container, hand the GPUs on to it",
        "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
        Citation("facebookresearch/pytorch3d#1259, mlx-cuda-13 0.32.4 without a driver", Provenance.REPRODUCED)),
    Signature("cuda.old_driver",
        r"Error: The NVIDIA driver on your system is too old \(found version (?P<version>\d+)\)"
        r"|CUDA driver version is insufficient for|unsupported display driver|PTX was compiled with an unsupp",
        "the NVIDIA driver is older than the CUDA that torch or MLX was built for",
        "update the driver of that node, or install a torch, or mlx[cuda12], built for its CUDA (see `nvidia-smi`)",
        "cudaMallocManaged(&data, size) failed: CUDA driver version is insufficient for CUDA runtime version",
        Citation("RangiLyu/nanodet#216, mlx-cuda-13 0.32.4 with a libcuda without GPU", Provenance.REPRODUCED)),
    Signature("cuda.no_library",
        r"(?:ImportError|OSError): (?P<library>lib(?!cuda\.so)(?:cu|nv|nccl|torch|c10)[\w.-]{1,60}): cannot open",
        "{library} is not on this host: what was installed is built for another CUDA, or another torch, than is there",
        "install torch with its extensions, or mlx[cuda13], for one CUDA, from the same lock file, on every node",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        Citation("glibc elf/dl-load.c, pytorch/pytorch#131284", Provenance.REPORTED)),
    Signature("cuda.no_kernel", r"no kernel image is available for execution on the device",
        "this torch or MLX, or an extension, was not built for this generation of GPU",
        "install a torch that supports it (`torch.cuda.get_arch_list()`), and build extensions anew; MLX wants sm_75",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        Citation("vllm-project/vllm#18835, Comfy-Org/ComfyUI#10326", Provenance.REPORTED)),
    Signature("cuda.device_ordinal", rf"{_CUDA}invalid device ordinal",
        "this node has fewer GPUs than ranks, or CUDA_VISIBLE_DEVICES hides some",
        "plan no more ranks, or `processes`, on that node than it has GPUs",
        "RuntimeError: CUDA error: invalid device ordinal",
        Citation("tatsu-lab/stanford_alpaca#67, yunqing-me/WatermarkDM#8", Provenance.REPORTED)),
    Signature("cuda.assert", rf"{_CUDA}device-side assert triggered",
        "a kernel found an index out of range: often a token outside the vocabulary, or a label outside the classes",
        "compare the tokenizer's size with vocab_size; CUDA_LAUNCH_BLOCKING=1, or one step on the CPU, names the place",
        "RuntimeError: CUDA error: device-side assert triggered",
        Citation("pytorch/pytorch#74079", Provenance.REPORTED)),
    Signature("cuda.illegal_access", rf"{_CUDA}(?P<why>{_ILLEGAL})",
        "a kernel failed on the GPU ({why}): a fault of the program, of the driver, or of the GPU itself",
        "see `dmesg | grep Xid` there; CUDA_LAUNCH_BLOCKING=1 (MLX: MLX_USE_CUDA_GRAPHS=0) names the place",
        "RuntimeError: cudaGraphLaunch(graph_exec, stream_) failed: an illegal memory access was encountered",
        Citation(f"{_MLX}/device.cpp, cudaGetErrorString of libcudart 13.5", Provenance.SOURCE)),
    Signature("cuda.ecc", rf"{_CUDA}uncorrectable ECC error encountered",
        "the GPU's memory is faulty",
        "reset the GPU or restart that node; if it comes back, have the GPU replaced and leave the node out",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        Citation("vllm-project/vllm#5222", Provenance.REPORTED)),
    # MLX on CUDA.
    Signature("cuda.mlx_cache", r"Cache thrashing is happening, please set the environment variable (?P<name>\w{1,60})",
        "a cache of MLX has missed more often than twice its size since the program began, which MLX calls an error",
        "set {name} to more in [job] env, or leave MLX_ENABLE_CACHE_THRASHING_CHECK to Flight Deck, which sets it to 0",
        "RuntimeError: Cache thrashing is happening, please set the environment variable MLX_CUDA_GRAPH_CACHE_SIZE to",
        Citation(f"{_MLX}/lru_cache.h", Provenance.SOURCE)),
    Signature("cuda.mlx_compile", r"Failed to compile kernel: |Failed to load compiled .{1,300} kernel: "
        r"|\bnvrtc\w{1,60}\(.{0,300}\) failed: |Can not find locations of CUDA headers",
        "MLX could not build one of its kernels for this GPU",
        "see with `pip check` that that node's nvidia-cuda-nvrtc and nvidia-cuda-runtime are those of mlx-cuda, or set "
        "CUDA_HOME; remove kernels that were built before (kernels/ in the node's folder)",
        "RuntimeError: Can not find locations of CUDA headers, please set environment variable CUDA_HOME or CUDA_PATH.",
        Citation(f"{_MLX}/jit_module.cpp", Provenance.SOURCE)),
    Signature("cuda.mlx_library",
        r"\bcublas\w{1,60}\(.{0,400}\) failed with code: (?P<code>\d+)|Can not find algorithm for matmul"
        r"|\b(?:cudnn\w{1,60}\(|graph\.|graph->).{0,300}\) failed: ",
        "cuBLAS or cuDNN refused an operation of MLX: for want of the GPU's memory, or of another version than MLX's",
        "use a smaller batch; see that nvidia-cublas and nvidia-cudnn are those of mlx-cuda (`pip check` there)",
        "RuntimeError: cublasLtCreate(&storage.handle) failed with code: 3.",
        Citation(f"{_MLX}/cublas_utils.cpp, {_MLX}/cudnn_utils.cpp", Provenance.SOURCE)),
    # NCCL in MLX.
    Signature("nccl.mlx", r"NCCL error \S{1,300}:\d+ '(?!remote process exited)(?P<why>[^']{1,150})'",
        "NCCL failed, at which MLX ends the rank without an exception: {why}",
        "read NCCL's own lines above (NCCL_DEBUG=INFO): often the interface, /dev/shm, or two ranks on one GPU",
        "NCCL error nccl.cpp:264 'unhandled system error (run with NCCL_DEBUG=INFO for details)'",
        Citation(f"{_NCCL}, ncclGetErrorString of NCCL 2.32", Provenance.SOURCE)),
    Signature("nccl.bind", r"\[nccl\] bind\(\) failed: (?P<why>.{1,80})",
        "rank 0 could not listen on NCCL's port: {why}",
        "end what holds the port (an earlier run's rank?)",
        "RuntimeError: [nccl] bind() failed: Address already in use",
        Citation(_NCCL, Provenance.SOURCE), reason=Reason.LAUNCH_FAILED, transient=True),
    Signature("nccl.connect", r"(?:\[Rank \d+\] connect\(\) failed after \d+ .{1,60}"
        r"|(?m:^)(?:recv|send)(?=: (?:Success|Connection re|Broken pipe))): (?P<why>.{1,80})",
        "a rank had no connection to rank 0, or lost it, through which NCCL's ranks find each other: {why}",
        "see whether rank 0 has started; if it has, make its first address and port reachable from every node",
        "RuntimeError: [Rank 1] connect() failed after 120000 milliseconds and 240 retries: Connection refused",
        Citation(_NCCL, Provenance.SOURCE), SignatureKind.CONSEQUENCE, transient=True),
    Signature("nccl.group_late", r"engine/trainer/collective\.py\", line \d+ in _init_nccl",
        "a rank has waited too long in MLX for the group of NCCL to form",
        "find the rank that did not start or hangs; if all have started, open every port between the nodes",
        '  File "/home/ana/.flightdeck/bundles/4f2a/engine/trainer/collective.py", line 125 in _init_nccl',
        Citation("our trainer, faulthandler", Provenance.REPRODUCED), SignatureKind.CONSEQUENCE, transient=True),
    Signature("nccl.unsupported", r"\[nccl\] (?:Send|Recv) not supported in NCCL|\[nccl\] Unknown or unsupported dtype",
        "the program sends from rank to rank, or exchanges booleans or 16-bit integers: MLX's NCCL has neither",
        'set backend = "ring" in [cluster]; or another strategy than pipeline, and arrays as `view(mx.uint8)`',
        "RuntimeError: [nccl] Send not supported in NCCL backend.",
        Citation(_NCCL, Provenance.SOURCE)),
)  # fmt: skip
