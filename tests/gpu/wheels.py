"""The wheels that a GPU machine without a network lacks: gathered here, in pieces to be carried, and installed there.

    uv run python -m tests.gpu.wheels [DIR] [--have FILE] [--mlx EXTRA] [--carrier-mib N]     here
    python3 -m tests.gpu.wheels --install DIR --into ENV                                      there

DIR/1, DIR/2, … are brought one at a time, each with this checkout. On the machine, python3 is the one that has PyTorch:
ENV becomes a virtual environment in which the wheels come first and that python's packages second. A wheel of which a
piece is missing waits in ENV for the call that brings it. README.md in this folder says how a visit goes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.gpu.part import ROOT

MANIFEST: Final = "manifest.json"
HAVE: Final = Path(__file__).with_name("have.txt")
CARRIER_MIB: Final = 64
MOST_PIECE: Final = 60_000_000
MOST_WHOLE: Final = 16_000_000
"""Bytes of a wheel above which it is compressed anew, which saves a tenth of MLX's 90 MB, and cut."""
_PER_FILE: Final = 1536
"""Bytes that a file of the checkout may take in an archive beyond its content."""
_SLACK: Final = 1 << 20
IMPORTS: Final = (
    "engine.api",
    "tui.app",
    "mlx.core",
    "mlx_lm.tuner.trainer",
    "torch",
    "transformers",
    "peft",
    "accelerate",
)
"""What has to be importable in ENV; together they import every package that is brought."""


_NEED: Final = re.compile(r"(\S+) \S+ (?:requires|has requirement) ([\w.-]+)")
"""A line of `pip check`."""


class WheelError(Exception):
    """What is wrong with the wheels or the environment, for a person."""


@dataclass(frozen=True)
class Piece:
    """A file that is carried: a whole wheel, or bytes of one. `folder` is the number of the call that brings it."""

    name: str
    size: int
    sha256: str
    folder: str


@dataclass(frozen=True)
class Wheel:
    """`compressed`: its pieces together are its xz. `size` and `sha256` are those of what is installed."""

    name: str
    size: int
    sha256: str
    pieces: tuple[Piece, ...]
    compressed: bool = False


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def checkout_size(root: Path = ROOT) -> int:
    """Bytes that travel with every folder: what git tracks or does not ignore, as an archive holds it."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    files = [root / name for name in listed if name and (root / name).is_file()]
    return sum(file.stat().st_size + _PER_FILE for file in files)


def pack(wheels: Iterable[Path], folder: Path, room: int, most_whole: int = MOST_WHOLE) -> list[Wheel]:
    """Put the wheels into folder/1, folder/2, …, each of at most `room` bytes: small ones whole, the others cut to what
    is left of each folder. Writes the manifest into every folder. Raises WheelError when there is no room."""
    if room < most_whole:
        raise WheelError(f"a call that carries the checkout has room for {room:,} bytes more, which is too little")
    number, used, packed = 1, 0, []
    for wheel in sorted(wheels, key=lambda file: (file.stat().st_size, file.name)):
        compressed = wheel.stat().st_size > most_whole
        carried = compress(wheel) if compressed else wheel
        left = carried.stat().st_size
        if not compressed and used + left > room:
            number, used = number + 1, 0
        pieces: list[Piece] = []
        with carried.open("rb") as opened:
            while data := opened.read(min(MOST_PIECE, room - used)):
                name = f"{carried.name}.{len(pieces) + 1}" if compressed else carried.name
                target = folder / str(number) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                pieces.append(Piece(name, len(data), hashlib.sha256(data).hexdigest(), str(number)))
                used, left = used + len(data), left - len(data)
                if left:
                    number, used = number + 1, 0
        packed.append(Wheel(wheel.name, wheel.stat().st_size, sha256_of(wheel), tuple(pieces), compressed))
    for each in {piece.folder for wheel in packed for piece in wheel.pieces}:
        write_manifest(folder / each / MANIFEST, packed)
    return packed


def compress(wheel: Path) -> Path:
    """Pack the wheel anew without compression, in its place, and compress that as a whole. Returns the xz file."""
    packed = wheel.with_suffix(".packed")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as target:
        for entry in source.infolist():
            target.writestr(entry, source.read(entry), compress_type=zipfile.ZIP_STORED)
    packed.replace(wheel)
    compressed = wheel.with_name(f"{wheel.name}.xz")
    with wheel.open("rb") as opened, lzma.open(compressed, "wb", preset=1) as out:
        shutil.copyfileobj(opened, out, 1 << 20)
    return compressed


def write_manifest(file: Path, wheels: Sequence[Wheel]) -> None:
    file.write_text(json.dumps([asdict(wheel) for wheel in wheels], indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> list[Wheel]:
    """That of a folder, or of the folders in it. Raises WheelError where there is none, or they differ."""
    texts = {file.read_text(encoding="utf-8") for file in [*folder.glob(MANIFEST), *folder.glob(f"*/{MANIFEST}")]}
    if len(texts) != 1:
        raise WheelError(f"{folder} has {len(texts) or 'no'} manifests ({MANIFEST}): one gathering makes one")
    return [
        Wheel(**{**wheel, "pieces": tuple(Piece(**piece) for piece in wheel["pieces"])})
        for wheel in json.loads(texts.pop())
    ]


def collect(folder: Path, kept: Path, wheels: Sequence[Wheel]) -> tuple[list[Path], list[Piece]]:
    """Put the pieces of `folder` into `kept`, and join what is complete there. Returns the wheels that are whole, and
    the pieces that are still to be brought. Raises WheelError for one that was damaged on its way."""
    kept.mkdir(parents=True, exist_ok=True)
    whole, missing = [], []
    for wheel in wheels:
        joined = kept / wheel.name
        if joined.exists() and sha256_of(joined) == wheel.sha256:
            whole.append(joined)
            continue
        absent = [piece for piece in wheel.pieces if not _bring(piece, folder, kept)]
        missing += absent
        if absent:
            continue
        if wheel.compressed:
            join([kept / piece.name for piece in wheel.pieces], joined)
        if sha256_of(joined) != wheel.sha256:
            raise WheelError(f"{wheel.name} is not what was gathered, although its pieces are")
        whole.append(joined)
    return whole, missing


def join(pieces: Sequence[Path], wheel: Path) -> None:
    """Write the wheel whose xz the pieces are, and remove them."""
    whole = wheel.with_name(f"{wheel.name}.xz")
    with whole.open("wb") as target:
        for piece in pieces:
            target.write(piece.read_bytes())
    with lzma.open(whole) as source, wheel.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    for file in (*pieces, whole):
        file.unlink()


def _bring(piece: Piece, folder: Path, kept: Path) -> bool:
    """The piece is in `kept`, from an earlier call or from `folder`."""
    target = kept / piece.name
    if target.exists() and sha256_of(target) == piece.sha256:
        return True
    source = next((file for file in (folder / piece.name, folder / piece.folder / piece.name) if file.exists()), None)
    if source is None:
        return False
    if (found := sha256_of(source)) != piece.sha256:
        raise WheelError(f"{source} is damaged: {source.stat().st_size:,} bytes of {piece.size:,}, SHA-256 {found}")
    shutil.copyfile(source, target)
    return True


def make_environment(folder: Path) -> Path:
    """A virtual environment of this python that also has this python's packages, its NVIDIA libraries where MLX looks
    for them, and this checkout. Returns its python.

    `--system-site-packages` would show those of the python below, when this one is of a virtual environment itself."""
    venv.EnvBuilder(with_pip=False, symlinks=True, clear=False).create(folder)
    packages = site_packages(folder)
    paths = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    there = [path for path in dict.fromkeys([*paths, sysconfig.get_path("purelib")]) if Path(path).is_dir()]
    (packages / "machine.pth").write_text("\n".join([*there, str(ROOT), ""]), encoding="utf-8")
    link_nvidia(packages, [Path(path) for path in there])
    ours = project()
    metadata = packages / f"{ours['name'].replace('-', '_')}-{ours['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    head = ["Metadata-Version: 2.1", f"Name: {ours['name']}", f"Version: {ours['version']}"]
    needs = [f"Requires-Dist: {need}" for need in ours["dependencies"]]
    metadata.write_text("\n".join([*head, *needs, ""]), encoding="utf-8")
    command = folder / "bin" / "flightdeck"
    command.write_text(f"#!{folder / 'bin' / 'python'}\nimport sys\nfrom tui.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    return folder / "bin" / "python"


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def link_nvidia(packages: Path, there: Iterable[Path]) -> None:
    """libmlx.so finds NVIDIA's libraries by their place beside it (its RPATH: $ORIGIN/../../nvidia/cu13/lib and
    others), and nvrtc the headers: so each folder of nvidia/ that the machine has is linked beside it."""
    for source in (found for path in there for found in sorted((path / "nvidia").glob("*"))):
        target = packages / "nvidia" / source.name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir() and not target.exists():
            target.symlink_to(source)


def pip_install(python: Path, wheels: Sequence[Path]) -> None:
    """Into the environment alone, whatever the machine's own packages are. Raises WheelError with what pip says."""
    argv = [
        *(sys.executable, "-m", "pip", "--python", str(python), "install"),
        *("--quiet", "--no-index", "--no-deps", "--ignore-installed", "--no-cache-dir", "--disable-pip-version-check"),
    ]
    packages = site_packages(python.parents[1])
    new = [wheel for wheel in wheels if not (packages / f"{'-'.join(wheel.name.split('-')[:2])}.dist-info").exists()]
    if not new:
        return
    done = subprocess.run([*argv, *map(str, new)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WheelError(f"pip: {(done.stderr or done.stdout).strip()[-2000:]}")


def unmet_needs(python: Path, brought: Sequence[Wheel], missing: Sequence[Piece]) -> list[str]:
    """What Flight Deck and the wheels need and the machine's own packages do not meet, as pip says it. Needs among the
    machine's own are its affair, and a wheel that is still to come is named elsewhere."""
    argv = [sys.executable, "-m", "pip", "--python", str(python), "check"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    needing = {package_of(wheel.name) for wheel in brought} | {project()["name"]}
    coming = {package_of(piece.name) for piece in missing}
    rows = [(line, _NEED.match(line)) for line in done.stdout.splitlines()]
    return [line for line, need in rows if need and need[1].lower() in needing and need[2].lower() not in coming]


def package_of(wheel: str) -> str:
    return wheel.partition("-")[0].lower().replace("_", "-")


def project() -> dict[str, Any]:
    """Flight Deck's own metadata."""
    metadata: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return metadata


def failing_imports(python: Path, modules: Sequence[str]) -> dict[str, str]:
    """Module -> why it cannot be imported in the environment, each tried in a process of its own."""

    def failure(module: str) -> str:
        argv = [str(python), "-c", f"import {module}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=python.parents[1])
        return "" if done.returncode == 0 else [f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1]

    with ThreadPoolExecutor() as pool:
        return {module: why for module, why in zip(modules, pool.map(failure, modules), strict=True) if why}


def missing_libraries(packages: Path) -> list[str]:
    """Libraries, and symbols of libraries, that MLX needs and the machine's lack, as ldd says; none where MLX is not
    installed. Those of libcuda.so.1 are the driver's."""
    library = packages / "mlx" / "lib" / "libmlx.so"
    if not library.exists() or shutil.which("ldd") is None:
        return []
    done = subprocess.run(["ldd", "-r", str(library)], capture_output=True, text=True, check=False)
    words = [line.split() for line in (done.stdout + done.stderr).splitlines()]
    absent = [line[0] for line in words if line[-2:] == ["not", "found"]]
    return absent or [line[2] for line in words if line[:2] == ["undefined", "symbol:"]]


def install(folder: Path, environment: Path, imports: Sequence[str] = IMPORTS) -> int:
    """0 when all that was brought works, also when pieces are still to come, which are named; else 1."""
    wheels = read_manifest(folder)
    whole, missing = collect(folder, environment / "wheels", wheels)
    python = make_environment(environment)
    pip_install(python, whole)
    print(f"{len(whole)} of {len(wheels)} wheels are installed in {environment}", flush=True)
    for piece in missing:
        print(f"not yet brought: {piece.name} ({piece.size:,} bytes), of folder {piece.folder}", flush=True)
    for library in missing_libraries(site_packages(environment)):
        print(f"MLX needs {library}, which is not on this machine", flush=True)
    unmet = unmet_needs(python, wheels, missing)
    for line in unmet:
        print(f"not met: {line}", flush=True)
    absent = {"mlx.core", "mlx_lm.tuner.trainer"} if any("mlx" in piece.name for piece in missing) else set()
    failures = failing_imports(python, [module for module in imports if module not in absent])
    for module, why in failures.items():
        print(f"cannot be imported: {module}: {why}", flush=True)
    print(f"python: {python}", flush=True)
    return 1 if failures or unmet else 0


def gather_into(folder: Path, have: Path, mlx: str, carrier_mib: int) -> int:
    from tests.gpu.gather import gather, read_names

    if folder.exists() and any(folder.iterdir()):
        raise WheelError(f"{folder} is not empty")
    room = (carrier_mib << 20) - checkout_size() - _SLACK
    downloads = folder / "downloads"
    packed = pack(list(gather(downloads, read_names(have), mlx)), folder, room)
    shutil.rmtree(downloads)
    for wheel in packed:
        places = ", ".join(f"{piece.folder} ({piece.size:,})" for piece in wheel.pieces)
        print(f"{wheel.name:<72} {wheel.size:>12,}  folder {places}")
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        print(f"{each}: {sum(file.stat().st_size for file in each.iterdir()):,} bytes of {room:,} beside the checkout")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu.wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu-wheels"), metavar="DIR")
    parser.add_argument("--have", type=Path, default=HAVE, metavar="FILE", help="what the machine has: a pip list")
    parser.add_argument("--mlx", default="cuda13", metavar="EXTRA", help="MLX's build: cuda13, cuda12 or cpu")
    parser.add_argument("--carrier-mib", type=int, default=CARRIER_MIB, help="what one call takes, checkout included")
    parser.add_argument("--install", type=Path, metavar="DIR")
    parser.add_argument("--into", type=Path, metavar="ENV")
    options = parser.parse_args()
    try:
        if options.install:
            if not options.into:
                parser.error("--install needs --into")
            return install(options.install.resolve(), options.into.resolve())
        return gather_into(options.folder.resolve(), options.have, options.mlx, options.carrier_mib)
    except (WheelError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
