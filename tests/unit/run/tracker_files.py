"""Reads what trackers have written, by TensorBoard's own reader and by the records of W&B's."""

from __future__ import annotations

import importlib
import json
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

_RECORDS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from wandb.proto.wandb_internal_pb2 import Record
found = []
for text in json.load(sys.stdin):
    record = Record.FromString(bytes.fromhex(text))
    kind = record.WhichOneof("record_type")
    if kind == "run":
        config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
        found.append(["run", {"id": record.run.run_id, "project": record.run.project, "config": config}])
    elif kind == "history":
        items = record.history.item
        found.append([kind, {each.key or each.nested_key[0]: json.loads(each.value_json) for each in items}])
    elif kind == "exit":
        found.append([kind, {"code": record.exit.exit_code}])
print(json.dumps(found))
"""
_BLOCK, _HEADER = 32768, 7


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag → (step, value, time) of each point, as TensorBoard shows them."""
    with warnings.catch_warnings(action="ignore"):
        accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(folder)).Reload()
    return {
        tag: [(point.step, point.value, point.wall_time) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def steps(folder: Path, tag: str) -> list[int]:
    return [step for step, _, _ in scalars(folder)[tag]]


def wandb_records(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The run, history and exit records of the one offline run below `folder`, in order."""
    (file,) = folder.glob("offline-run-*/*.wandb")
    texts = [record.hex() for record in _logged(file.read_bytes())]
    argv = [sys.executable, "-c", _RECORDS]
    done = subprocess.run(argv, input=json.dumps(texts), capture_output=True, text=True, check=True)
    return [(kind, fields) for kind, fields in json.loads(done.stdout)]


def history(folder: Path) -> list[dict[str, Any]]:
    return [fields for kind, fields in wandb_records(folder) if kind == "history"]


def _logged(data: bytes) -> list[bytes]:
    """LevelDB's log format: records in blocks of 32 KiB, a long one in parts (1 whole, 2 first, 3 middle, 4 last)."""
    assert data[:4] == b":W&B"
    records, parts, place = [], b"", _HEADER
    while place < len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, place)
        parts += data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if part in (1, 4):
            records.append(parts)
            parts = b""
    return records
