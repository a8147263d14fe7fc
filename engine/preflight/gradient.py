"""gradient_layer: a real all_sum over a real mlx.launch ring of the real ranks, on ports and with a nonce of its own.

Without the right environment MLX makes a group of size 1 and says nothing: every rank would train alone. So the size is
compared with the configuration's, and every sum must be exact.
"""

from __future__ import annotations

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus
from engine.preflight import hostfile, versions
from engine.preflight.check import Check, verdict

NAME = "gradient_layer"


async def look(config: FlightConfig) -> CheckResult:
    return verdict(NAME, CheckStatus.FAIL, "not written")


CHECK = Check(NAME, "a real all_sum over the real ring", look, time_limit_s=120, needs=(versions.NAME, hostfile.NAME))
