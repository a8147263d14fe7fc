"""The parts that show PyTorch training on a GPU, the most valuable first."""

from __future__ import annotations

import json
import shutil
from typing import Final

from tests.gpu.part import Part, Visit

_FACTS: Final = """
import json, sys, torch
device = sys.argv[1]
values = torch.ones(1 << 20, device=device)
assert float(values.sum()) == 1 << 20
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": "cpu"}
if device == "cuda":
    free, total = torch.cuda.mem_get_info()
    found |= {"device": torch.cuda.get_device_name(), "total": total, "free": free,
              "capability": ".".join(map(str, torch.cuda.get_device_capability()))}
print(json.dumps(found))
"""


def facts(visit: Visit) -> None:
    """torch computes on the device; its name and memory."""
    if not visit.dry:
        if shutil.which("nvidia-smi") is None:
            visit.cannot("there is no nvidia-smi here")
        visit.record("nvidia-smi", visit.call(["nvidia-smi"], limit_s=20).output)
        visit.record("nvidia-smi -q", visit.call(["nvidia-smi", "-q"], limit_s=20).output)
    done = visit.call([visit.python, "-c", _FACTS, visit.device])
    if done.code != 0:
        visit.record("torch", done.errors)
        visit.result("torch computes", "no", target="yes", ok=False, note=done.errors[-200:])
        return
    for name, value in json.loads(done.output.splitlines()[-1]).items():
        visit.result(name, str(value))
    visit.result("torch computes", "yes", target="yes", ok=True)


PARTS: Final = (Part("torch-facts", "PyTorch computes on the GPU; nvidia-smi is recorded", 60.0, facts),)
