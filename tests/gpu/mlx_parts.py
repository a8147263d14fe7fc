"""The parts that show MLX training on a GPU, the most valuable first."""

from __future__ import annotations

import json
from typing import Final

from tests.gpu.part import Part, Visit

_FACTS: Final = """
import json, sys, mlx.core as mx
device = sys.argv[1]
assert device == "cpu" or mx.cuda.is_available(), "mx.cuda.is_available() is False"
mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
assert mx.ones((1 << 20,)).sum().item() == 1 << 20
print(json.dumps({"mlx": mx.__version__} | {f"device_info.{k}": v for k, v in mx.device_info().items()}))
"""


def facts(visit: Visit) -> None:
    """MLX computes on the device; what it says of it."""
    done = visit.call([visit.python, "-c", _FACTS, visit.device])
    if done.code != 0:
        visit.record("mlx", done.errors)
        visit.result("mlx computes", "no", target="yes", ok=False, note=done.errors[-200:])
        return
    for name, value in json.loads(done.output.splitlines()[-1]).items():
        visit.result(name, str(value))
    visit.result("mlx computes", "yes", target="yes", ok=True)


PARTS: Final = (Part("mlx-facts", "MLX computes on the GPU", 60.0, facts),)
