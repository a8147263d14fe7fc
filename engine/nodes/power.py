"""Power and heat: macOS's `pmset`, Linux's power supplies and thermal zones."""

from __future__ import annotations

import re

from engine.nodes.words import rows, whole, word

_SOURCE = re.compile(r"Now drawing from '([^']{1,40})'")
_CHARGE = re.compile(r"InternalBattery\S*.*?\b(\d{1,3})%")
_LOW_POWER = re.compile(r"^\s*lowpowermode\s+([01])\b", re.MULTILINE)
_POWER_MODE = re.compile(r"^\s*powermode\s+([0-2])\b", re.MULTILINE)
_SPEED_LIMIT = re.compile(r"^\s*CPU_Speed_Limit\s*=\s*(\d{1,3})\b", re.MULTILINE)
_LEVEL = re.compile(
    r"^(?:Note: )?(Thermal|CPU Power|Performance) Warning Level\D{0,20}(\d{1,2})\b", re.I | re.MULTILINE
)
_NO_LEVEL = "No thermal warning level has been recorded"


def mac_source(pmset_batt: str) -> str | None:
    """ "AC", "battery 63 %", or the system's word ("UPS Power")."""
    drawing = _SOURCE.search(pmset_batt)
    if drawing is None:
        return None
    if drawing[1] == "AC Power":
        return "AC"
    if drawing[1] != "Battery Power":
        return word(drawing[1], 40)
    charge = _CHARGE.search(pmset_batt)
    return f"battery {min(int(charge[1]), 100)} %" if charge else "battery"


def mac_low_power(pmset: str) -> bool | None:
    """`pmset -g`: lowpowermode, or powermode 1 on Macs with a high power mode as well."""
    if match := _LOW_POWER.search(pmset):
        return match[1] == "1"
    match = _POWER_MODE.search(pmset)
    return match[1] == "1" if match else None


def mac_thermal(pmset_therm: str) -> str | None:
    """ "nominal", or what `pmset -g therm` says of a throttled machine."""
    limit = _SPEED_LIMIT.search(pmset_therm)
    if limit is not None and int(limit[1]) < 100:
        return f"CPU limited to {int(limit[1])} %"
    for level in _LEVEL.finditer(pmset_therm):
        if level[2] != "0":
            return f"{level[1].lower()} warning level {level[2]}"
    return "nominal" if limit is not None or _NO_LEVEL in pmset_therm else None


def linux_source(power_supply: object) -> str | None:
    """From the script's list of /sys/class/power_supply; None where nothing tells, as on most servers."""
    # A mouse's battery has the scope "Device".
    supplies = [row for row in rows(power_supply) if row.get("scope") != "Device"]
    batteries = [row for row in supplies if row.get("type") == "Battery"]
    mains = [row for row in supplies if row.get("type") in ("Mains", "USB")]
    if any(row.get("online") == "1" for row in mains):
        return "AC"
    if not batteries:
        return None
    if not mains and all(row.get("status") != "Discharging" for row in batteries):
        return "AC"
    charge = whole(batteries[0].get("capacity"))
    return f"battery {charge} %" if charge is not None and charge <= 100 else "battery"


def linux_low_power(platform_profile: object) -> bool | None:
    profile = platform_profile.strip() if isinstance(platform_profile, str) else ""
    return profile in ("low-power", "quiet") if profile else None


def linux_thermal(zones: object) -> str | None:
    """ "nominal", or the first zone that is over one of its limits; None where there are no zones."""
    known = rows(zones)
    for zone in known:
        temperature = whole(zone.get("temp"))
        for point in range(6):
            kind, limit = zone.get(f"trip_point_{point}_type"), whole(zone.get(f"trip_point_{point}_temp"))
            if temperature and limit and kind in ("passive", "hot", "critical") and temperature >= limit:
                name = word(zone.get("type"), 40) or "a zone"
                return f"{name} at {temperature / 1000:.0f} °C, {kind} limit {limit / 1000:.0f} °C"
    return "nominal" if known else None
