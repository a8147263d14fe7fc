"""Known failure texts: each has one signature, which explains it."""

from __future__ import annotations

import json
import re

import pytest

from engine.failures.explanation import explain, findings
from engine.failures.signature import Signature, SignatureKind
from engine.failures.signatures import BY_ID, SIGNATURES
from tests.data import DATA

FAILURES: list[dict[str, str]] = json.loads((DATA / "failures.json").read_text())


def known(text: str) -> list[str]:
    return [signature.id for signature in SIGNATURES if re.search(signature.pattern, text)]


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_an_example_is_known_by_its_signature_and_by_no_other(signature: Signature) -> None:
    assert known(signature.example) == [signature.id]
    (found,) = findings([signature.example])
    assert (found.signature, found.kind) == (signature, signature.kind)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_a_signature_has_a_cause_and_a_source(signature: Signature) -> None:
    groups = dict.fromkeys(re.compile(signature.pattern).groupindex, "x")
    assert signature.cause.format(**groups) and signature.fix.format(**groups) and signature.source.text
    assert len(signature.cause) < 200 and len(signature.fix) < 220, "it is to be read in a narrow pane"


def test_ids_are_unique() -> None:
    assert len(BY_ID) == len(SIGNATURES)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_nothing_but_digits_repeats_without_a_bound(signature: Signature) -> None:
    """Else a line could cost more than a constant times its length."""
    bare = re.sub(r"\\[^d]", "_", signature.pattern)
    assert re.findall(r"(?<!\\d)[*+]|\{\d*,\}", bare) == []


def test_every_failure_on_file_has_its_signature() -> None:
    assert {failure["id"] for failure in FAILURES} <= BY_ID.keys()
    assert len(FAILURES) == 50


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure["id"])
def test_a_failure_on_file_matches_its_own_signature_and_no_other(failure: dict[str, str]) -> None:
    assert known(failure["text"]) == [failure["id"]]
    (found,) = findings([failure["text"]])
    assert (found.kind is SignatureKind.NOISE) == (failure["severity"] == "noise")
    assert "{" not in found.cause + (found.fix or "")


@pytest.mark.parametrize(
    ("module", "signature"),
    [
        ("mlx", "import.mlx"),
        ("mlx.core", "import.mlx"),
        ("mlx.nn.layers", "import.mlx"),
        ("mlx_lm.tuner", "import.mlx"),
        ("mlx.data", "import.other"),
        ("mlx.launch", "import.other"),
        ("mlxtend", "import.other"),
        ("mlx.distributed", "import.mlx_distributed"),
        ("mlx.distributed.ring", "import.mlx_distributed"),
    ],
)
def test_only_modules_of_mlx_and_mlx_lm_tell_of_another_environment(module: str, signature: str) -> None:
    (found,) = findings([f"ModuleNotFoundError: No module named '{module}'"])
    assert found.signature is BY_ID[signature]


def test_a_folder_that_macos_keeps_private_names_full_disk_access_and_others_do_not() -> None:
    for path, private in (("/Users/ana/Documents/a.jsonl", True), ("/Volumes/ext/a", True), ("/Users/ana/a", False)):
        found = known(f"PermissionError: [Errno 1] Operation not permitted: '{path}'")
        assert (found == ["os.full_disk_access"]) is private


_LAST_ERROR = """torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.27.3
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
"""
_ENDS = {
    "nccl.peer_lost": "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.",
    "nccl.same_gpu": _LAST_ERROR + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000",
    "nccl.versions_differ": _LAST_ERROR
    + "Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703",
    "nccl.invalid_usage": _LAST_ERROR + "Error: network gIB not found.",
    "nccl.watchdog_stuck": "[rank7]:[F429 14:03:49.385461578 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) "
    "Rank 7] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
    "torch.other_build": "OSError: ~/miniconda3/lib/python3.8/site-packages/torch_cluster/_grid_cuda.so: undefined "
    "symbol: _ZNK3c104Type14isSubtypeOfExtESt10shared_ptrIS0_EPSo",
    "torch.old_system": "ImportError: /lib64/libc.so.6: version `GLIBC_2.28' not found (required by /opt/x.so)",
    "cuda.no_library": "OSError: libcublas.so.12: cannot open shared object file: No such file or directory",
}


@pytest.mark.parametrize(("known", "text"), _ENDS.items(), ids=_ENDS)
def test_what_nccl_and_the_loader_of_libraries_print_is_explained(known: str, text: str) -> None:
    traceback = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n' + text
    found = explain([f"[rank1]: {line}" for line in traceback.splitlines()])
    assert found is not None and found.signature is BY_ID[known]


def test_a_warning_about_a_library_that_was_left_out_does_not_explain_an_end() -> None:
    warning = "UserWarning: Disabling 'pyg-lib'. Stacktrace: /lib64/libm.so.6: version `GLIBC_2.29' not found"
    assert explain([warning]) is None


_OF_MLX = [
    ("cuda.oom", "RuntimeError: cudaMallocAsync(&data, size, stream) failed: out of memory"),
    ("cuda.oom", "RuntimeError: cudaGraphInstantiate(&handle_, graph, nullptr, nullptr, 0) failed: out of memory"),
    ("cuda.oom", "CUDA error /project/mlx/distributed/nccl/nccl.cpp:287 'out of memory'"),
    ("metal.malloc", "RuntimeError: [malloc] Unable to allocate 68719476736 bytes."),
    ("cuda.no_driver", "RuntimeError: cudaGetDeviceCount(&count) failed: no CUDA-capable device is detected"),
    ("cuda.no_driver", "CUDA error /project/mlx/distributed/nccl/nccl.cpp:287 'no CUDA-capable device is detected'"),
    (
        "cuda.old_driver",
        "ImportError: cudaMallocManaged(&data, size) failed: CUDA driver version is insufficient for CUDA runtime "
        "version",
    ),
    ("cuda.device_ordinal", "RuntimeError: cudaSetDevice(device_) failed: invalid device ordinal"),
    ("cuda.assert", "RuntimeError: cudaStreamSynchronize(stream_) failed: device-side assert triggered"),
    ("cuda.ecc", "RuntimeError: cudaStreamSynchronize(stream_) failed: uncorrectable ECC error encountered"),
    ("cuda.illegal_access", "RuntimeError: cudaGraphLaunch(graph_exec, stream_) failed: misaligned address"),
    ("cuda.mlx_compile", "RuntimeError: nvrtcGetCUBINSize(prog, &ptx_size) failed: NVRTC_ERROR_INVALID_PROGRAM"),
    ("cuda.mlx_library", "RuntimeError: graph.build() failed: No valid execution plans built."),
    ("cuda.mlx_library", "RuntimeError: cudnnCreate(&storage.handle) failed: CUDNN_STATUS_NOT_INITIALIZED."),
    ("nccl.peer_lost", "NCCL error nccl.cpp:370 'remote process exited or there was a network error'"),
    ("nccl.mlx", "NCCL error nccl.cpp:264 'invalid usage (run with NCCL_DEBUG=WARN for details)'"),
    ("nccl.connect", "recv: Connection reset by peer"),
    ("nccl.connect", "recv: Success"),
    ("nccl.connect", "send: Broken pipe"),
]
"""Texts of CUDA and NCCL in the forms that mlx/backend/cuda and mlx/distributed/nccl give them."""


@pytest.mark.parametrize(("signature", "text"), _OF_MLX)
def test_what_mlx_on_cuda_prints_has_one_meaning(signature: str, text: str) -> None:
    assert known(text) == [signature]


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: vkAllocateMemory(device, &info) failed: out of memory",
        "OSError: mmap(0, length) failed: misaligned address",
        "recv: 12 batches",
        "worker.send: Broken pipe in the plot",
        '  File "/home/ana/bundle/engine/trainer/collective.py", line 35 in __init__',
    ],
    ids=["another-allocator", "another-call", "a-count", "a-method", "ring"],
)
def test_texts_that_resemble_those_of_mlx_on_cuda_are_not_taken_for_them(text: str) -> None:
    assert known(text) == []


def test_nccls_own_line_explains_more_than_the_one_with_which_mlx_ends() -> None:
    own = (
        "gpu-1:1958:1958 [0] init.cc:790 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    )
    found = explain([own, _OF_MLX[-1][1]])
    assert found is not None and found.signature is BY_ID["nccl.same_gpu"]
