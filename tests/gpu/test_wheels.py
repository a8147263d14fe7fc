"""What is gathered for a GPU machine is what is installed there, in whichever order its folders are brought."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.gpu import gather, wheels
from tests.gpu.part import ROOT
from tests.gpu.wheels import MANIFEST, WheelError, collect, pack, read_manifest, sha256_of
from tests.needs import TORCH


def made_wheel(folder: Path, name: str, *, content: bytes = b"", requires: tuple[str, ...] = ()) -> Path:
    """One that pip installs, with a module of that name."""
    files = {
        f"{name}.py": b"VALUE = 1\n",
        f"{name}_data.bin": content,
        f"{name}-1.0.dist-info/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in requires)]
        ).encode(),
        f"{name}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=") for path, data in files.items()
    }
    record = "".join(f"{path},sha256={digests[path].decode()},{len(data)}\n" for path, data in files.items())
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in {**files, f"{name}-1.0.dist-info/RECORD": record.encode()}.items():
            archive.writestr(path, data)
    return wheel


def random_bytes(count: int) -> bytes:
    """The same ones in each run, which do not compress."""
    return b"".join(hashlib.sha256(str(number).encode()).digest() for number in range(count // 32))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Folders 1 to 3: a small wheel and the first piece of a big one, then the rest of that."""
    made = tmp_path / "made"
    files = [made_wheel(made, "small"), made_wheel(made, "big", content=random_bytes(50_000), requires=("numpy<1",))]
    pack(files, tmp_path / "packed", room=20_000, most_whole=5_000)
    return tmp_path / "packed"


def test_no_folder_has_more_than_a_call_carries(packed: Path) -> None:
    folders = sorted(packed.iterdir())
    assert [folder.name for folder in folders] == ["1", "2", "3"]
    for folder in folders:
        assert sum(file.stat().st_size for file in folder.iterdir() if file.name != MANIFEST) <= 20_000
    small, big = read_manifest(packed)
    assert [piece.folder for piece in small.pieces] == ["1"]
    assert [piece.folder for piece in big.pieces] == ["1", "2", "3"]


def test_pieces_that_come_one_folder_at_a_time_are_joined_when_all_are_there(packed: Path, tmp_path: Path) -> None:
    listed, kept = read_manifest(packed), tmp_path / "kept"
    whole, missing = collect(packed / "2", kept, listed)
    assert whole == []
    assert [piece.folder for piece in missing] == ["1", "1", "3"]
    whole, missing = collect(packed / "1", kept, listed)
    assert [file.name for file in whole] == ["small-1.0-py3-none-any.whl"]
    assert [piece.name for piece in missing] == ["big-1.0-py3-none-any.whl.xz.3"]
    whole, missing = collect(packed / "3", kept, listed)
    assert missing == []
    assert [sha256_of(file) for file in whole] == [wheel.sha256 for wheel in listed]
    with zipfile.ZipFile(whole[1]) as archive:
        assert archive.testzip() is None
        assert archive.read("big_data.bin") == random_bytes(50_000)
    assert sorted(file.name for file in kept.iterdir()) == sorted(wheel.name for wheel in listed)


def test_a_damaged_piece_is_named(packed: Path, tmp_path: Path) -> None:
    piece = next((packed / "2").glob("*.xz.2"))
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    with pytest.raises(WheelError, match=r"2/big-1\.0-py3-none-any\.whl\.xz\.2 is damaged"):
        collect(packed, tmp_path / "kept", read_manifest(packed))


def test_folders_of_two_gatherings_are_not_mixed(packed: Path) -> None:
    (packed / "2" / MANIFEST).write_text("[]")
    with pytest.raises(WheelError, match="2 manifests"):
        read_manifest(packed)


def test_a_call_without_room_beside_the_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="room for 100 bytes"):
        pack([made_wheel(tmp_path, "small")], tmp_path / "packed", room=100, most_whole=5_000)


def test_needs_are_the_locks_for_that_machine_without_what_it_has(tmp_path: Path) -> None:
    lock = tmp_path / "uv.lock"
    lock.write_text(
        """
package = [
  { name = "root", version = "1", dependencies = [
    { name = "a" }, { name = "mac", marker = "sys_platform == 'darwin'" }, { name = "torch" },
    { name = "forked", version = "1", marker = "python_full_version < '3.12'" },
    { name = "forked", version = "2", marker = "python_full_version >= '3.12'" } ] },
  { name = "a", version = "5", dependencies = [
    { name = "b" }, { name = "nvidia-cublas" } ], optional-dependencies = { more = [{ name = "c" }] } },
  { name = "b", version = "6", dependencies = [{ name = "a", extra = ["more"] }] },
  { name = "c", version = "11" },
  { name = "mac", version = "7" },
  { name = "torch", version = "8", dependencies = [{ name = "sympy" }] },
  { name = "sympy", version = "9" },
  { name = "forked", version = "1", resolution-markers = ["python_full_version < '3.12'"] },
  { name = "forked", version = "2", resolution-markers = ["python_full_version >= '3.12'"] },
  { name = "nvidia-cublas", version = "10" },
]
"""
    )
    needed = gather.locked_requirements(lock, "root", ["torch", "nvidia-*"])
    assert needed == {"a": "5", "b": "6", "c": "11", "forked": "2"}


def test_what_a_machine_has_may_be_a_pip_list_or_a_freeze(tmp_path: Path) -> None:
    file = tmp_path / "list"
    file.write_text(
        "Package Version\n------- -------\ntorch 2.11.0\nHuggingface_Hub==1.33.0\nnvidia-*  # all\n\n# none\n"
    )
    assert gather.read_names(file) == ["package", "torch", "huggingface-hub", "nvidia-*"]
    assert gather.has("nvidia-cudnn-cu13", gather.read_names(file))
    assert not gather.has("nvidia", gather.read_names(file))


def test_an_extras_needs_are_those_that_it_adds(tmp_path: Path) -> None:
    wheel = made_wheel(
        tmp_path,
        "base",
        requires=(
            "metal; platform_system == 'Darwin'",
            "cuda13==1; extra == 'cuda13'",
            "cpu==1; extra == 'cpu'",
            "always",
        ),
    )
    assert [each.name for each in gather.requirements_of(wheel, "cuda13")] == ["cuda13"]
    assert [each.name for each in gather.requirements_of(wheel)] == ["always"]


def test_the_machines_nvidia_libraries_lie_beside_what_is_installed(tmp_path: Path) -> None:
    for name in ("cu13/lib/libcublas.so.13", "cudnn/lib/libcudnn.so.9"):
        library = tmp_path / "machine" / "nvidia" / name
        library.parent.mkdir(parents=True)
        library.touch()
    packages = tmp_path / "environment"
    (packages / "mlx" / "lib").mkdir(parents=True)
    wheels.link_nvidia(packages, [tmp_path / "machine", tmp_path / "absent"])
    wheels.link_nvidia(packages, [tmp_path / "machine"])
    assert (packages / "mlx" / "lib" / "../../nvidia/cu13/lib/libcublas.so.13").is_file()
    assert (packages / "mlx" / "lib" / "../../nvidia/cudnn/lib/libcudnn.so.9").is_file()


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_what_is_brought_comes_first_in_the_environment_and_what_the_machine_has_second(
    packed: Path, tmp_path: Path
) -> None:
    """With the python of an environment that has PyTorch, twice: with a piece missing, and with all."""

    def install(folder: Path) -> str:
        program = (
            "import sys, pathlib; from tests.gpu.wheels import install\n"
            "sys.exit(install(*map(pathlib.Path, sys.argv[1:3]), imports=sys.argv[3:]))\n"
        )
        argv = [str(TORCH), "-c", program, str(folder), str(tmp_path / "env"), "engine.protocol.attempt", "small"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
        # That python lacks what Flight Deck itself needs.
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    first = install(packed / "1").splitlines()
    assert f"1 of 2 wheels are installed in {tmp_path / 'env'}" in first
    assert any(line.startswith("not yet brought: big-1.0-py3-none-any.whl.xz.2") for line in first)
    assert any("mlx-flightdeck" in line and "textual" in line for line in first if line.startswith("not met"))
    assert not any("numpy<1" in line or "cannot" in line for line in first)
    rest = tmp_path / "rest"
    (packed / "1").rename(tmp_path / "first")
    packed.rename(rest)
    second = install(rest).splitlines()
    assert f"2 of 2 wheels are installed in {tmp_path / 'env'}" in second
    assert any(line.startswith("not met: big 1.0 has requirement numpy<1") for line in second)
    code = "import big, engine, importlib.util as u; print(u.find_spec('torch').origin, big.__file__, engine.__file__)"
    done = subprocess.run(
        [tmp_path / "env/bin/python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    torch, big, engine = done.stdout.split()
    assert Path(big).is_relative_to(tmp_path / "env")
    assert Path(torch).is_relative_to(TORCH.parents[1])
    assert Path(engine).is_relative_to(ROOT)
