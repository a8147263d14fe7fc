"""The commands of a Mac, one program under many names: run as `/usr/sbin/sysctl` it answers as macOS's sysctl, from the
document of the node's personality, and from Linux's kernel what is real: processes, disks, addresses, ports.

Half of what an answer costs are imports, and a probe asks for a dozen: what one command alone needs it imports itself.

Each function names the source of what it prints: a man page, Apple's open source, or a recording of a real Mac. What a
command is not known to do ends with EX_USAGE and "not modelled", so that nothing is taken for macOS's that is not.
FAULTS makes commands late, cut or failing, by their names. Standard library alone, with the project's interpreter.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path("/usr/local/libexec/mac")
"""On a node: the document, the faults, and this program."""
DOCUMENT, FAULTS = ROOT / "mac.json", ROOT / "faults.json"
ASSERTIONS = ROOT / "assertions"
LOW_POWER = ROOT / "lowpowermode"
DISPLAY = ASSERTIONS / "display"
"""What was done to the display, a line each."""
LINUX = Path("/usr/local/libexec/linux")
"""Linux's own /proc and /sys: a Mac has neither."""
PROC = LINUX / "proc"
EX_USAGE = 64
PAGE = 16384
APPLES = ("/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/", "/usr/libexec/")
"""Where the kernel shows nobody a program's environment (XNU: platform binaries under System Integrity Protection)."""
TEMPORARY = "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T"
"""_CS_DARWIN_USER_TEMP_DIR of confstr(3)."""

Document = dict[str, Any]
Addresses = dict[str, tuple[list[str], bool]]
"""Device → its IPv4 addresses with prefixes, and True when it is up."""


class Mac:
    """One Mac: its document, and the addresses of its devices as they are now."""

    def __init__(self, document: Document, read_addresses: Callable[[Document], Addresses] | None = None) -> None:
        """By default its devices have the document's addresses."""
        self.document = document
        self.ports: list[Document] = document["ports"]
        self._read_addresses = read_addresses or planned_addresses

    def __getitem__(self, name: str) -> Any:
        return self.document.get(name)

    @property
    def lan(self) -> str:
        """The device of the network that works."""
        return str(self["network"][0][1])

    @cached_property
    def addresses(self) -> Addresses:
        return self._read_addresses(self.document)

    def mac_address(self, device: str) -> str:
        return f"02:00:5e:{self['number']:02x}:00:{sum(device.encode()) % 256:02x}"


class NotModelled(Exception):
    """Nothing is known of what macOS would do."""


class IllegalOption(Exception):
    """An option that the command does not have."""


def getopt(words: list[str], letters: str) -> tuple[list[tuple[str, str]], list[str]]:
    """getopt(3), as Python's, which takes half as long to import as a command may take to answer."""
    options, rest = [], list(words)
    while rest and len(rest[0]) > 1 and rest[0].startswith("-"):
        cluster = rest.pop(0)[1:]
        if cluster == "-":
            break
        while cluster:
            letter, cluster = cluster[0], cluster[1:]
            at = letters.find(letter)
            if at < 0 or letter == ":":
                raise IllegalOption(letter)
            value = ""
            if letters[at + 1 : at + 2] == ":":
                if not cluster and not rest:
                    raise IllegalOption(letter)
                value, cluster = cluster or rest.pop(0), ""
            options.append((f"-{letter}", value))
    return options, rest


Answer = Callable[[Mac, list[str]], "str | tuple[str, str, int]"]
"""The output, or (output, errors, exit code)."""
COMMANDS: dict[str, Answer] = {}


def command(function: Answer) -> Answer:
    COMMANDS[function.__name__] = function
    return function


@command
def uname(mac: Mac, words: list[str]) -> str:
    """uname(1); the version's form is a real Mac's."""
    darwin = mac["macos"][2]
    version = f"Darwin Kernel Version {darwin}: root:xnu-12377.101.15~1/RELEASE_ARM64_T6041"
    parts = {"s": "Darwin", "n": mac["name"], "r": darwin, "v": version, "m": "arm64", "p": "arm", "o": "Darwin"}
    asked = "".join(words).replace("-", "") or "s"
    return " ".join(parts[key] for key in "snrvmpo" if key in asked.replace("a", "snrvm")) + "\n"


@command
def sw_vers(mac: Mac, words: list[str]) -> str:
    """sw_vers(1), and recordings of its output."""
    version, build, _ = mac["macos"]
    fields = {"ProductName": "macOS", "ProductVersion": version, "BuildVersion": build}
    if not words:
        return "".join(f"{name}:\t\t{value}\n" for name, value in fields.items())
    asked = words[0].lstrip("-").lower()
    return "".join(f"{value}\n" for name, value in fields.items() if name.lower() == asked)


def oids(mac: Mac) -> dict[str, str]:
    """The names of sysctl(8) that somebody asks for, with values in the form of recordings."""
    levels: list[tuple[str, int]] = mac["levels"]
    cores = sum(count for _, count in levels)
    total = swap(mac) / 2**20
    found = {
        "hw.ncpu": cores,
        "hw.activecpu": cores,
        "hw.physicalcpu": cores,
        "hw.logicalcpu": cores,
        "hw.memsize": mac["memory_bytes"],
        "hw.pagesize": PAGE,
        "hw.model": mac["model"],
        "hw.nperflevels": len(levels),
    }
    for number, (name, count) in enumerate(levels):
        found |= {f"hw.perflevel{number}.physicalcpu": count, f"hw.perflevel{number}.name": name}
    found |= {
        "iogpu.wired_limit_mb": 0,
        "kern.bootsessionuuid": _text("sys/kernel/random/boot_id").strip().upper(),
        "kern.hostname": mac["name"],
        "kern.osproductversion": mac["macos"][0],
        "kern.osrelease": mac["macos"][2],
        "kern.ostype": "Darwin",
        "kern.maxfilesperproc": 61440,
        "machdep.cpu.brand_string": mac["chip"],
        "vm.swapusage": f"total = {total:.2f}M  used = {total / 16:.2f}M  free = {total * 15 / 16:.2f}M  (encrypted)",
    }
    return {name: str(value) for name, value in found.items()}


@command
def sysctl(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """sysctl(8) and Apple's sysctl.c: a name stands for all below it; an unknown one is said and the rest goes on."""
    options, names = getopt(words, "aAbeihnNoqw")
    flags = {flag for flag, _ in options}
    values, lines, errors = oids(mac), [], []
    for name in names or ([""] if "-a" in flags else []):
        if "=" in name:
            errors.append(f"sysctl: {name.partition('=')[0]}: Operation not permitted")
            continue
        found = [each for each in values if each == name or each.startswith(f"{name}." if name else "")]
        if not found:
            errors.append(f"sysctl: unknown oid '{name}'")
        lines += [values[each] if "-n" in flags else f"{each}: {values[each]}" for each in found]
    return _lines(lines), _lines(errors), int(bool(errors))


def swap(mac: Mac) -> int:
    """Bytes; a sixteenth of them is in use."""
    return int(mac["memory_bytes"]) // 2**30 * 2**23


@command
def system_profiler(mac: Mac, words: list[str]) -> str:
    """system_profiler(8); the documents have the keys of recordings of these data types."""
    if "-json" not in words:
        raise NotModelled
    writers = {
        "SPHardwareDataType": lambda: [hardware(mac)],
        "SPDisplaysDataType": lambda: [displays(mac)],
        "SPThunderboltDataType": lambda: [bus(mac, port) for port in reversed(mac.ports)],
    }
    asked = {name: writers[name]() for name in words if name in writers}
    if not asked:
        raise NotModelled
    return json.dumps(asked, indent=2, separators=(",", " : ")) + "\n"


def hardware(mac: Mac) -> Document:
    counts = ":".join(str(count) for _, count in mac["levels"])
    cores = sum(count for _, count in mac["levels"])
    return {
        "_name": "hardware_overview",
        "chip_type": mac["chip"],
        "machine_model": mac["model"],
        "machine_name": mac["product"],
        "number_processors": f"proc {cores}:{counts}:0",
        "physical_memory": f"{mac['memory_bytes'] // 2**30} GB",
    }


def displays(mac: Mac) -> Document:
    return {
        "_name": mac["chip"],
        "spdisplays_metal": "spdisplays_supported",
        "spdisplays_vendor": "sppci_vendor_Apple",
        "sppci_bus": "spdisplays_builtin",
        "sppci_cores": str(mac["gpu_cores"]),
        "sppci_device_type": "spdisplays_gpu",
        "sppci_model": mac["chip"],
    }


def bus(mac: Mac, port: Document) -> Document:
    """One Thunderbolt bus; a computer at the other end has a domain of its own, a dock or a disk has none."""
    peer, number = port["peer"], int(port["receptacle"]) - 1
    switch = f"0x{mac['number']:08X}{number:08X}"
    items = peer and {
        "_name": peer["product"],
        "device_id_key": "0xA",
        "device_name_key": peer["model"],
        **({"domain_uuid_key": peer["uuid"]} if peer["uuid"] else {}),
    }
    connected = "receptacle_connected" if peer else "receptacle_no_devices_connected"
    return {
        **({"_items": [items]} if peer else {}),
        "_name": f"thunderboltusb4_bus_{number}",
        "device_name_key": mac["product"],
        "domain_uuid_key": port["uuid"],
        "receptacle_1_tag": {
            "current_speed_key": mac["speed"] if peer else "Up to 120 Gb/s",
            "link_status_key": "0x2" if peer else "0x100",
            "receptacle_id_key": port["receptacle"],
            "receptacle_status_key": connected,
        },
        "route_string_key": "0",
        "switch_uid_key": switch,
        "vendor_name_key": "Apple Inc.",
    }


@command
def ioreg(mac: Mac, words: list[str]) -> str:
    """ioreg(8); the accelerator's line in the form that people report."""
    if "IOAccelerator" not in words:
        raise NotModelled
    use = '{"Device Utilization %"=3,"Renderer Utilization %"=2,"Tiler Utilization %"=1,"In use system memory"=1048576}'
    head = "+-o AGXAcceleratorG16X  <class AGXAcceleratorG16X, id 0x100000a2f, registered, matched, active, busy 0>"
    cores = mac["gpu_cores"]
    return f'{head}\n    {{\n      "gpu-core-count" = {cores}\n      "PerformanceStatistics" = {use}\n    }}\n\n'


@command
def vm_stat(mac: Mac, words: list[str]) -> str:
    """vm_stat(1), in the form of a recording; a third of the memory is in use."""
    del words
    pages = mac["memory_bytes"] // PAGE
    counts = {
        "Pages free": pages // 4,
        "Pages active": pages // 3,
        "Pages inactive": pages // 4,
        "Pages speculative": pages // 100,
        "Pages throttled": 0,
        "Pages wired down": pages // 12,
        "Pages purgeable": pages // 200,
        '"Translation faults"': 574921,
        "Pages copy-on-write": 38671,
        "File-backed pages": pages // 4,
        "Anonymous pages": pages // 4,
        "Pages stored in compressor": 0,
        "Pages occupied by compressor": 0,
        "Swapins": 0,
        "Swapouts": 0,
    }
    rows = "".join(f"{name + ':':<39}{f'{count}.':>16}\n" for name, count in counts.items())
    return f"Mach Virtual Memory Statistics: (page size of {PAGE} bytes)\n{rows}"


@command
def memory_pressure(mac: Mac, words: list[str]) -> str:
    """memory_pressure(1) and Apple's memory_pressure.c, with -Q."""
    if words != ["-Q"]:
        raise NotModelled
    size = mac["memory_bytes"]
    head = f"The system has {size} ({size // PAGE} pages with a page size of {PAGE})."
    return f"{head}\nSystem-wide memory free percentage: 66%\n"


SETTINGS = {
    "custom": "AC Power:\n displaysleep         10\n sleep                0\n autorestart          1\n",
    "sched": "",
    "therm": "".join(f"Note: No {kind} warning level has been recorded\n" for kind in ("thermal", "performance")),
}
"""What pmset prints after -g."""


@command
def pmset(mac: Mac, words: list[str]) -> str:
    """pmset(1): -g, -g batt, -g therm, -g assertions, -g custom and -g sched as pmset.c prints them,
    displaysleepnow, and as root -a lowpowermode; Apple silicon has only the two notes
    of -g therm (recorded)."""
    match words:
        case ["-g"]:
            settings = {"sleep": 1, "lowpowermode": int(LOW_POWER.exists())}
            rows = "".join(f" {name:<21}{value}\n" for name, value in settings.items())
            return f"System-wide power settings:\nCurrently in use:\n{rows}"
        case ["displaysleepnow"]:
            return _note_display("asleep")
        case ["-g", kind] if kind in SETTINGS:
            return SETTINGS[kind]
        case ["-a", "lowpowermode", "0" | "1" as low] if os.geteuid() == 0:
            LOW_POWER.touch() if low == "1" else LOW_POWER.unlink(missing_ok=True)
            return ""
        case ["-g", "batt"]:
            charge = mac["battery"]
            source = "Battery" if charge is not None and charge < 100 else "AC"
            state = "discharging; 4:12 remaining" if source == "Battery" else "charged; 0:00 remaining"
            battery = f" -InternalBattery-0 (id=1)\t{charge}%; {state} present: true\n"
            return f"Now drawing from '{source} Power'\n" + (battery if charge is not None else "")
        case ["-g", "assertions"]:
            return assertions()
    raise NotModelled


def assertions() -> str:
    """What `caffeinate` holds now."""
    held = [name for name in _names(ASSERTIONS) if (PROC / name).exists()]
    kinds = ("PreventUserIdleSystemSleep", "PreventSystemSleep", "PreventDiskIdle")
    lines = ["Assertion status system-wide:", *(f"   {kind:<31}{int(bool(held))}" for kind in kinds)]
    lines.append("Listed by owning process:")
    lines += [
        f"   pid {pid}(caffeinate): [0x0000000100058000] 00:00:01 PreventUserIdleSystemSleep "
        'named: "caffeinate command-line tool"'
        for pid in held
    ]
    return _lines(lines)


@command
def caffeinate(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """caffeinate(8): holds its assertions until the process of -w, the seconds of -t, or its utility has ended."""
    del mac
    options, utility = getopt(words, "disumt:w:")
    given = dict(options)
    mark = ASSERTIONS / str(os.getpid())
    mark.touch()
    if "-u" in given:
        _note_display("awake")
    try:
        if utility:
            import subprocess

            return "", "", subprocess.run(utility, check=False).returncode
        until = time.monotonic() + float(given.get("-t", "inf"))
        while time.monotonic() < until and ("-w" not in given or _runs(int(given["-w"]))):
            time.sleep(0.2)
    finally:
        mark.unlink(missing_ok=True)
    return "", "", 0


def _note_display(state: str) -> str:
    with DISPLAY.open("a") as file:
        file.write(f"{state}\n")
    return ""


@command
def defaults(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """defaults(1): where nothing was ever set."""
    del mac
    return "", f"Domain {words[-1]} does not exist\n", 1


@command
def notifyutil(mac: Mac, words: list[str]) -> str:
    """notifyutil(1); OSThermalPressureLevel of libkern/OSThermalNotification.h."""
    if words != ["-g", "com.apple.system.thermalpressurelevel"]:
        raise NotModelled
    return f"{words[1]} {mac['thermal']}\n"


@command
def macmon(mac: Mac, words: list[str]) -> str:
    """`macmon pipe` of its readme; every -i milliseconds a line, as long as somebody reads."""
    if words[-1:] != ["pipe"]:
        raise NotModelled
    every = float(words[words.index("-i") + 1]) / 1000 if "-i" in words else 1.0
    memory = {"ram_total": mac["memory_bytes"], "ram_usage": mac["memory_bytes"] // 3}
    sample = {
        "temp": {"cpu_temp_avg": 43.7, "gpu_temp_avg": 36.9},
        "memory": memory | {"swap_total": swap(mac), "swap_usage": swap(mac) // 16},
        "cpu_active_ratio": 0.092,
        "gpu_freq_mhz": 461,
        "gpu_active_ratio": 0.09,
        "gpu_power": 0.017,
        "all_power": 0.222,
        "sys_power": 5.876,
    }
    while True:
        print(json.dumps(sample), flush=True)
        time.sleep(every)


@command
def networksetup(mac: Mac, words: list[str]) -> str:
    """networksetup(8), in the form of recordings."""
    if words != ["-listallhardwareports"]:
        raise NotModelled
    word = mac["thunderbolt_word"] or "Thunderbolt"
    named = [*mac["network"], *((f"{word} {port['receptacle']}", port["device"]) for port in mac.ports)]
    blocks = [(name, device, mac.mac_address(device)) for name, device in [*named, ("Thunderbolt Bridge", "bridge0")]]
    text = "".join(
        f"\nHardware Port: {name}\nDevice: {device}\nEthernet Address: {own}\n" for name, device, own in blocks
    )
    return text + "\nVLAN Configurations\n===================\n"


@command
def ipconfig(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """ipconfig(8): getifaddr, which MLX's distributed_config asks for."""
    if len(words) != 2 or words[0] != "getifaddr":
        raise NotModelled
    ips, _ = mac.addresses.get(words[1], ([], False))
    return (f"{ips[0].partition('/')[0]}\n", "", 0) if ips else ("", "", 1)


@command
def ifconfig(mac: Mac, words: list[str]) -> str:
    """ifconfig(8), in the form of recordings: -a, one interface, and as root what MLX's set-up commands do."""
    match [word for word in words if word != "inet"]:
        case [] | ["-a"]:
            names = ["lo0", *(device for _, device in mac["network"]), *(p["device"] for p in mac.ports), "bridge0"]
            return "".join(interface(mac, name) for name in names)
        case [name]:
            return interface(mac, name)
        case [name, "down" | "up" as state]:
            _ip("link", "set", name, state)
            for port in mac.ports if name == "bridge0" else ():
                # Linux delivers nothing to a member of a bridge, even of one that is down; macOS does.
                if port["device"] in mac.addresses:
                    _ip("link", "set", port["device"], *(("master", name) if state == "up" else ("nomaster",)))
            return ""
        case [name, ip, "netmask", mask]:
            prefix = sum(int(part).bit_count() for part in mask.split("."))
            _ip("addr", "replace", f"{ip}/{prefix}", "dev", name)
            return ""
    raise NotModelled


def interface(mac: Mac, name: str) -> str:
    """One interface of `ifconfig`."""
    if name == "lo0":
        flags, options = (
            "flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384",
            "1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>",
        )
        ends = "\tinet 127.0.0.1 netmask 0xff000000\n\tinet6 ::1 prefixlen 128\n\tnd6 options=201<PERFORMNUD,DAD>\n"
        return f"lo0: {flags}\n\toptions={options}\n{ends}"
    ips, up = mac.addresses.get(name, ([], True))
    port = next((port for port in mac.ports if port["device"] == name), None)
    if port is not None:
        linked = port["peer"] is not None and name in mac.addresses
    elif name == "bridge0":
        linked = up and any(each["peer"] for each in mac.ports)
    else:
        linked = bool(ips)
    kind = "8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST>" if up else "8822<BROADCAST,SMART,SIMPLEX,MULTICAST>"
    lines = [
        f"{name}: flags={kind} mtu 1500",
        "\toptions=460<TSO4,TSO6,CHANNEL_IO>",
        f"\tether {mac.mac_address(name)}",
    ]
    for text in ips:
        ip, _, prefix = text.partition("/")
        mask = (0xFFFFFFFF << (32 - int(prefix))) & 0xFFFFFFFF
        last = _number(ip) | (~mask & 0xFFFFFFFF)
        lines.append(
            f"\tinet {ip} netmask {mask:#010x} broadcast {'.'.join(str(last >> at & 255) for at in (24, 16, 8, 0))}"
        )
    if name == "bridge0":
        lines += ["\tConfiguration:", "\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0"]
        for number, member in enumerate(mac.ports, 9):
            lines.append(f"\tmember: {member['device']} flags=3<LEARNING,DISCOVER>")
            lines.append(f"\t        ifmaxaddr 0 port {number} priority 0 path cost 0")
    lines += ["\tnd6 options=201<PERFORMNUD,DAD>", "\tmedia: autoselect <full-duplex>"]
    return _lines([*lines, f"\tstatus: {'active' if linked else 'inactive'}"])


@command
def route(mac: Mac, words: list[str]) -> str:
    """route(8): `change PEER -interface DEVICE`, as MLX's set-up has it, and `get`."""
    match [word for word in words if word not in ("-n", "-q")]:
        case ["change" | "add", peer, "-interface", device]:
            _ip("route", "replace", peer, "dev", device)
            return f"{words[0]} host {peer}: gateway {device}\n"
        case ["get", target]:
            device = json.loads(_ip("-j", "route", "get", target))[0]["dev"]
            return f"   route to: {target}\n  interface: {mac.lan if device == 'eth0' else device}\n"
    raise NotModelled


@command
def netstat(mac: Mac, words: list[str]) -> str:
    """netstat(1): -rn and -an -p tcp, Apple's columns."""
    if words in (["-rn"], ["-nr"]):
        rows = []
        for row in json.loads(_ip("-j", "route")):
            device = mac.lan if row["dev"] == "eth0" else row["dev"]
            gateway, flags = (row["gateway"], "UGScg") if "gateway" in row else ("link#6", "UCS")
            rows.append(f"{row['dst']:<19}{gateway:<19}{flags:<12}{device}")
        head = "Destination        Gateway            Flags       Netif Expire"
        return _lines(["Routing tables", "", "Internet:", head, *rows])
    if "tcp" in words:
        head = "Proto Recv-Q Send-Q  Local Address          Foreign Address        (state)"
        rows = [f"tcp4       0      0  {ip}.{port:<16}*.*                    LISTEN" for ip, port, _ in listeners()]
        return _lines(["Active Internet connections (including servers)", head, *rows])
    raise NotModelled


@command
def lsof(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """lsof(8): who listens on a TCP port, with `-F p`; without root it sees the caller's own processes."""
    del mac
    port = next((int(word[6:]) for word in words if word.startswith("-iTCP:")), None)
    if port is None or "-sTCP:LISTEN" not in words or words[-2:] != ["-F", "p"]:
        raise NotModelled
    inodes = {inode for _, own, inode in listeners() if own == port}
    holders = []
    for pid in _pids():
        links = PROC / str(pid) / "fd"
        if any(_link(links / name) in {f"socket:[{inode}]" for inode in inodes} for name in _names(links)):
            holders.append(f"p{pid}")
    return _lines(holders), "", int(not holders)


def listeners() -> Iterator[tuple[str, int, str]]:
    """(address, port, inode) of each listening socket."""
    for row in _text("net/tcp").splitlines()[1:]:
        fields = row.split()
        if fields[3] == "0A":
            ip, _, port = fields[1].partition(":")
            own = ".".join(str(byte) for byte in reversed(bytes.fromhex(ip)))
            yield "*" if own == "0.0.0.0" else own, int(port, 16), fields[9]


class Running(NamedTuple):
    """A process."""

    pid: int
    stat: list[str]
    """From the state on, as in proc(5)."""
    uid: int
    words: list[str]
    """Its arguments; of a command of this program as a Mac's."""
    environment: str
    """As `ps -E` appends it; "" where macOS shows none."""

    @property
    def started(self) -> float:
        """Seconds since boot."""
        return int(self.stat[19]) / os.sysconf("SC_CLK_TCK")

    @property
    def cpu_s(self) -> float:
        return (int(self.stat[11]) + int(self.stat[12])) / os.sysconf("SC_CLK_TCK")


def processes() -> Iterator[Running]:
    interpreter = os.path.realpath(sys.executable)
    for pid in _pids():
        folder = PROC / str(pid)
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            uid = folder.stat().st_uid
            words = [vis(word) for word in (folder / "cmdline").read_bytes().split(b"\0")[:-1]]
        except OSError:
            continue
        program = _link(folder / "exe")
        if words[1:2] == ["-IS"] and words[2:3] and Path(words[2]).name in PLACES:
            words, program = words[2:], words[2]
        environment = ""
        if program != interpreter and program.startswith(APPLES):
            pass
        elif uid == os.getuid() or os.getuid() == 0:
            try:
                environment = vis((folder / "environ").read_bytes().replace(b"\0", b" ").rstrip())
            except OSError:
                environment = ""
        yield Running(pid, stat, uid, words or [f"({_text(f'{pid}/comm').strip()})"], environment)


def vis(text: bytes) -> str:
    """As ps prints it in the C locale: strvis(3) with VIS_TAB | VIS_NL | VIS_NOSLASH."""

    def shown(byte: int) -> str:
        if byte in (9, 10, 0xA0):
            return f"\\{byte:03o}"
        mark, low = ("M" if byte > 127 else ""), byte & 127
        if low < 32 or low == 127:
            return f"{mark}^{chr(low ^ 64)}"
        return f"{mark}-{chr(low)}" if mark else chr(low)

    return "".join(map(shown, text))


COLUMNS: dict[str, Callable[[Running], str]] = {
    "pid": lambda each: str(each.pid),
    "ppid": lambda each: each.stat[1],
    "pgid": lambda each: each.stat[2],
    "sess": lambda each: "0",
    "uid": lambda each: str(each.uid),
    "user": lambda each: _user(each.uid),
    "stat": lambda each: {"D": "U", "Z": "Z", "T": "T", "R": "R"}.get(each.stat[0], "S"),
    "pcpu": lambda each: f"{100 * each.cpu_s / max(_uptime() - each.started, 0.01):.1f}",
    "rss": lambda each: str(int(each.stat[21]) * os.sysconf("SC_PAGE_SIZE") // 1024),
    "time": lambda each: f"{int(each.cpu_s) // 60}:{each.cpu_s % 60:05.2f}",
    "etime": lambda each: _elapsed(_uptime() - each.started),
    "lstart": lambda each: time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(_boot_time() + each.started)),
    "comm": lambda each: each.words[0],
    "command": lambda each: " ".join(each.words),
}
ALIASES = {"args": "command", "%cpu": "pcpu", "state": "stat", "ucomm": "comm"}


@command
def ps(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """ps(1) of macOS and Apple's ps.c: BSD's flags, -E for the environment after the command, and none of Apple's own
    programs. It exits with 1 when no process was selected."""
    del mac
    options, rest = getopt(words, "AaCcdEeGgfhjLlMmo:O:p:rSTt:U:u:vwXx")
    flags = "".join(flag[1] for flag, _ in options)
    if rest:
        raise NotModelled
    wanted = {int(pid) for flag, text in options if flag == "-p" for pid in text.split(",") if pid.isdigit()}
    formats = [part for flag, text in options if flag in ("-o", "-O") for part in re.split(r"[,\s]+", text)]
    columns = [(*part.partition("=")[:1], "=" in part) for part in formats or ["pid", "stat", "time", "command"]]
    rows = []
    for each in processes():
        if wanted:
            selected = each.pid in wanted
        else:
            own = each.uid == os.getuid() or any(flag in flags for flag in "aAe")
            selected = own and ("x" in flags or "A" in flags or "e" in flags or each.stat[4] != "0")
        if not selected:
            continue
        values = []
        for name, _ in columns:
            key = ALIASES.get(name, name)
            if key not in COLUMNS:
                raise NotModelled
            value = COLUMNS[key](each)
            values.append(f"{value} {each.environment}".rstrip() if key == "command" and "E" in flags else value)
        rows.append(values)
    # The width of each column is that of its widest value, but the last has none.
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(len(columns) - 1)]
    heads = [" ".join(name.upper() for name, _ in columns)] if not all(silent for _, silent in columns) else []
    lines = [
        " ".join([*(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return _lines([*heads, *lines]), "", int(not rows)


@command
def df(mac: Mac, words: list[str]) -> str:
    """df(1) of macOS, with the columns of recordings; blocks of 512 bytes unless -k, -m or -g."""
    del mac
    options, paths = getopt(words, "abcgHhIiklmnPtT:Y,")
    unit = {"-k": 1024, "-m": 2**20, "-g": 2**30}.get(
        next((flag for flag, _ in options if flag in ("-k", "-m", "-g")), ""), 512
    )
    name = {512: "512-blocks", 1024: "1024-blocks", 2**20: "1M-blocks", 2**30: "1G-blocks"}[unit]
    lines = [f"Filesystem {name} Used Available Capacity iused ifree %iused Mounted on"]
    for path in paths or ["/"]:
        disk = os.statvfs(path)
        total, used, free = (
            blocks * disk.f_frsize // unit for blocks in (disk.f_blocks, disk.f_blocks - disk.f_bfree, disk.f_bavail)
        )
        share = round(100 * used / max(1, used + free))
        lines.append(f"/dev/disk3s5 {total} {used} {free} {share}% 1000 9000000 0% /System/Volumes/Data")
    return _lines(lines)


@command
def stat(mac: Mac, words: list[str]) -> str:
    """stat(1) of BSD with -f and -L; GNU's -c is an illegal option."""
    del mac
    options, paths = getopt(words, "FLf:lnqrst:x")
    template = dict(options).get("-f")
    if template is None:
        raise NotModelled
    lines = []
    for path in paths:
        found = Path(path).stat() if ("-L", "") in options else Path(path).lstat()
        values = {"Su": _user(found.st_uid), "Lp": f"{found.st_mode & 0o777:o}", "u": found.st_uid, "g": found.st_gid}
        values |= {"z": found.st_size, "m": int(found.st_mtime), "i": found.st_ino, "N": path}
        line = template
        for key, value in values.items():
            line = line.replace(f"%{key}", str(value))
        lines.append(line)
    return _lines(lines)


@command
def date(mac: Mac, words: list[str]) -> str:
    """date(1) of BSD: +FORMAT, -u, -r SECONDS; GNU's -d is an illegal option, and its %N is no conversion."""
    del mac
    options, rest = getopt(words, "jRnuf:r:v:I:")
    given = dict(options)
    at = float(given.get("-r", time.time()))
    template = rest[0].removeprefix("+") if rest else "%a %b %e %H:%M:%S %Z %Y"
    return time.strftime(template.replace("%N", "N"), time.gmtime(at) if "-u" in given else time.localtime(at)) + "\n"


@command
def mktemp(mac: Mac, words: list[str]) -> str:
    """mktemp(1) of macOS and Apple's mktemp.c: without a template the file lies in confstr's folder, whatever TMPDIR
    says."""
    del mac
    options, templates = getopt(words, "dp:qt:u")
    given = dict(options)
    start = templates[0].rstrip("X") if templates else f"{given.get('-p', TEMPORARY)}/{given.get('-t', 'tmp')}."
    path = Path(start + os.urandom(5).hex())
    path.mkdir(0o700) if "-d" in given else path.touch(0o600, exist_ok=False)
    return f"{path}\n"


@command
def rdma_ctl(mac: Mac, words: list[str]) -> str:
    """`rdma_ctl status` as recorded; `enable` works in Recovery only, and what it says elsewhere is not known."""
    if words != ["status"]:
        raise NotModelled
    return "enabled\n" if mac["rdma"] else "disabled\n"


@command
def ibv_devices(mac: Mac, words: list[str]) -> str:
    """As in MLX's documentation; only the two headings where RDMA is off."""
    del words
    rows = [f"    {'rdma_' + port['device']:<16}\t{guid(mac, port):016x}" for port in mac.ports if mac["rdma"]]
    return _lines(["    device          \t   node GUID", "    ------          \t----------------", *rows])


@command
def ibv_devinfo(mac: Mac, words: list[str]) -> str:
    """As recorded, with the table of addresses for -v: an IPv4 address of the port itself makes `::ffff:a.b.c.d`."""
    if not mac["rdma"]:
        return "No IB devices found\n"
    lines: list[str] = []
    for port in mac.ports:
        active = "PORT_ACTIVE (4)" if port["peer"] else "PORT_DOWN (1)"
        ips, _ = mac.addresses.get(port["device"], ([], True))
        lines += [f"hca_id:\trdma_{port['device']}", "\ttransport:\t\t\tThunderbolt (100)", "\tphys_port_cnt:\t\t\t1"]
        lines += ["\t\tport:\t1", f"\t\t\tstate:\t\t\t{active}", "\t\t\tlink_layer:\t\tThunderbolt"]
        gids = ["fe80:0000:0000:0000:0200:5eff:fe00:5307", *(f"::ffff:{ip.partition('/')[0]}" for ip in ips)]
        lines += [f"\t\t\tGID[{number:3}]:\t\t{gid}" for number, gid in enumerate(gids) if "-v" in words]
        lines.append("")
    return _lines(lines)


def guid(mac: Mac, port: Document) -> int:
    return (int(mac["number"]) + 1 << 16) + int(port["receptacle"])


@command
def launchctl(mac: Mac, words: list[str]) -> str:
    """launchctl(1): a login over ssh is in the Background domain; the limit of open files is a real Mac's."""
    del mac
    if words == ["managername"]:
        return "Background\n"
    if words == ["limit", "maxfiles"]:
        return "\tmaxfiles    256            unlimited      \n"
    raise NotModelled


@command
def xcode_select(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """xcode-select(1) where the developer tools are missing."""
    del mac, words
    return "", "xcode-select: error: unable to get active developer directory\n", 2


@command
def python3(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """Apple's stub in /usr/bin where the developer tools are missing."""
    del mac, words
    return "", "xcode-select: note: No developer tools were found, requesting install.\n", 1


@command
def sudo(mac: Mac, words: list[str]) -> tuple[str, str, int]:
    """sudo(8) and sudo's tgetpass.c: it needs a terminal to ask for the password, and takes any; then `su`, whose PAM
    rules let everybody in on this node."""
    import getpass

    del mac
    argv = [word for word in words if word not in ("-n", "-k", "--")]
    if "-n" in words:
        return "", "sudo: a password is required\n", 1
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        advice = "either use the -S option to read from standard input or configure an askpass helper"
        return "", f"sudo: a terminal is required to read the password; {advice}\nsudo: a password is required\n", 1
    getpass.getpass("Password:")
    return os.execv("/usr/bin/su", ["su", "root", "-s", "/bin/sh", "-c", shlex.join(argv)])


FOLDERS = {
    "/usr/bin": "uname sw_vers vm_stat memory_pressure pmset caffeinate stat notifyutil mktemp xcode-select python3 "
    "defaults sudo rdma_ctl ibv_devices ibv_devinfo",
    "/usr/sbin": "sysctl system_profiler ioreg networksetup ipconfig netstat lsof",
    "/sbin": "ifconfig route",
    "/bin": "ps df date launchctl",
    "/opt/homebrew/bin": "macmon",
}
PLACES = {name: folder for folder, names in FOLDERS.items() for name in names.split()}
"""Command → its folder on macOS."""


def answer(mac: Mac, name: str, words: list[str]) -> tuple[str, str, int]:
    """(output, errors, exit code) of one command."""
    try:
        answered = COMMANDS[name.replace("-", "_")](mac, words)
    except NotModelled:
        return "", f"{name}: {' '.join(words)}: not modelled by tests.cluster\n", EX_USAGE
    except IllegalOption as error:
        return "", f"{name}: illegal option -- {error}\nusage: {name}\n", 1
    except OSError as error:
        return "", f"{name}: {error.filename or ''}: {error.strerror}\n", 1
    return (answered, "", 0) if isinstance(answered, str) else answered


def main(argv: list[str]) -> int:
    """Answer as the command of argv[0], with the fault that it has been given."""
    name = Path(argv[0]).name
    mac = Mac(json.loads(DOCUMENT.read_text()), live_addresses)
    fault = json.loads(FAULTS.read_text()).get(name, {}) if FAULTS.exists() else {}
    time.sleep(fault.get("late_s", 0))
    output, errors, code = fault.get("output"), "", 0
    if output is None:
        output, errors, code = answer(mac, name, argv[1:])
    sys.stdout.write(output[: fault.get("cut")])
    sys.stdout.flush()
    sys.stderr.write(fault.get("errors", errors))
    return int(fault.get("exit_code", code))


def planned_addresses(document: Document) -> Addresses:
    """Those that the cabling's file gives."""
    found: Addresses = {document["network"][0][1]: ([document["ip"]], True)}
    found |= {port["device"]: ([port["ip"]] if port["ip"] else [], True) for port in document["ports"]}
    bridge = document["bridge"]
    return found | {"bridge0": ([bridge["ip"]] if bridge["ip"] else [], bridge["up"])}


def live_addresses(document: Document) -> Addresses:
    """As Linux's kernel has them: eth0 is the network that works, and a cable's end has its device's name."""
    found: Addresses = {}
    for row in json.loads(_ip("-j", "addr")):
        ips = [f"{each['local']}/{each['prefixlen']}" for each in row["addr_info"] if each["family"] == "inet"]
        name = document["network"][0][1] if row["ifname"] == "eth0" else row["ifname"]
        found[name] = ips, "UP" in row["flags"]
    return found


def _ip(*words: str) -> str:
    """Linux's ip. Raises OSError with what it said."""
    import subprocess

    done = subprocess.run(["/usr/sbin/ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.returncode, done.stderr.strip())
    return done.stdout


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _number(ip: str) -> int:
    return int.from_bytes(bytes(map(int, ip.split("."))), "big")


def _text(name: str) -> str:
    """A file of Linux's /proc; "" where there is none."""
    try:
        return (PROC / name).read_text(errors="replace")
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _pids() -> list[int]:
    return sorted(int(name) for name in _names(PROC) if name.isdigit())


def _runs(pid: int) -> bool:
    fields = _text(f"{pid}/stat").rpartition(")")[2].split()
    return bool(fields) and fields[0] != "Z"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _uptime() -> float:
    return float(_text("uptime").split()[0])


def _boot_time() -> int:
    return int(re.findall(r"^btime (\d+)$", _text("stat"), re.MULTILINE)[0])


def _elapsed(seconds: float) -> str:
    """`[[dd-]hh:]mm:ss` of ps(1)."""
    whole = int(seconds)
    days, hours, rest = whole // 86400, whole // 3600 % 24, f"{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{days:02}-{hours:02}:{rest}" if days else f"{hours:02}:{rest}" if hours else rest


if __name__ == "__main__":
    sys.exit(main(sys.argv))
