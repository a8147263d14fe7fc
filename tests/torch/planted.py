"""Loads planted and real pickles as the PyTorch trainer does, and prints what came of it as JSON: run by the nodes'
python in a folder of its own.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import Metadata

from engine.torch_trainer.strategies import _Reader, _Writer, read_weights
from engine.torch_trainer.unpickling import restrict_unpickling

MARKER = "ran"


class Planted:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def imported(name: str) -> bytes:
    """A pickle that names a class of a module which nothing has imported."""
    return f"c{name}\nThing\n.".encode()


TOUCH = f"open({MARKER!r}, 'w')"
PICKLES: dict[str, bytes] = {
    "os.system": pickle.dumps(Planted(os.system, f"touch {MARKER}")),
    "subprocess": pickle.dumps(Planted(subprocess.check_call, ["touch", MARKER])),
    "eval": pickle.dumps(Planted(eval, TOUCH)),
    "partial": pickle.dumps(Planted(functools.partial, eval, TOUCH)),
    "in a real one": pickle.dumps(Metadata({}, planner_data=Planted(eval, TOUCH))),
    "of PyTorch": pickle.dumps(Planted(torch.load, "planted.pt")),
    "a dotted name": b"\x80\x04\x8c'torch.distributed.checkpoint.filesystem\x8c\tos.system\x93\x8c\ttouch ran\x85R.",
    "an import": imported("planted_module"),
}


def outcome(load: Callable[[], Any]) -> str:
    try:
        return f"loaded: {type(load()).__name__}"
    except BaseException as error:  # CheckpointException is none of Exception
        return f"{type(error).__name__}: {error}"


def loads(folder: Path, content: bytes) -> dict[str, Callable[[], Any]]:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return {
        "metadata": _Reader(folder).read_metadata,
        "dcp": functools.partial(dcp.load, {}, storage_reader=_Reader(folder)),
        "message": functools.partial(distributed_c10d._tensor_to_object, tensor, len(content), None),
        "torch.load": functools.partial(torch.load, folder / "planted.pt", weights_only=False),
        "ZeRO": functools.partial(read_weights, folder, "deepspeed ZeRO-2 fp32"),
    }


def main() -> None:
    restrict_unpickling()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=0, world_size=1)
    Path("planted_module.py").write_text(f"{TOUCH}\nclass Thing: pass\n")
    # As where a script's folder is on the path.
    __import__("sys").path.insert(0, ".")
    found: dict[str, dict[str, str]] = {}
    for name, content in PICKLES.items():
        folder = Path(name)
        folder.mkdir()
        (folder / ".metadata").write_bytes(content)
        (folder / "planted.pt").write_bytes(content)
        (folder / "state").mkdir()
        (folder / "state" / "mp_rank_00_model_states.pt").write_bytes(content)
        found[name] = {how: outcome(load) for how, load in loads(folder, content).items()}
    state = {"model": {"weight": torch.ones(2, 3, dtype=torch.bfloat16)}, "optimizer": {"step": 3, "name": "adam"}}
    dcp.save(state, storage_writer=_Writer(Path("real")))
    loaded = {"model": {"weight": torch.zeros(2, 3, dtype=torch.bfloat16)}, "optimizer": {"step": 0, "name": ""}}
    dcp.load(loaded, storage_reader=_Reader(Path("real")))
    gathered: list[Any] = [None]
    message = {"names": {"a"}, "rank": (1, None), "error": OSError(28, "full"), "dtype": torch.float32}
    dist.all_gather_object(gathered, message)
    torch.save(state, buffer := io.BytesIO())
    buffer.seek(0)
    real = {
        "dcp": [loaded["model"]["weight"].sum().item(), loaded["optimizer"]],
        "message": repr(gathered[0]) == repr(message),
        "torch.load": torch.load(buffer, weights_only=False)["optimizer"],
    }
    print(json.dumps({"planted": found, "ran": Path(MARKER).exists(), "real": real}))


if __name__ == "__main__":
    main()
