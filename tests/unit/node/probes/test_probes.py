"""Probes, as processes of their own."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.node import processes
from engine.node.probes import dataset, did_you_mean, model_files, nearest, network, storage
from engine.node.probes.files import probe_inputs
from engine.node.processes import start_time
from engine.protocol.attempt import NONCE_ENV
from engine.protocol.checksums import crc32_text
from engine.training.jsonl import JsonlRows
from tests.machine import NONCE, WATCHED
from tests.waiting import wait_until


@contextmanager
def rank(nonce: str = NONCE, *words: str, watched: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is deaf to everything but KILL; one that is not `watched` is stale to whoever looks."""
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    environment = {**os.environ, NONCE_ENV: nonce}
    argv = [sys.executable, "-c", script, *words, *([WATCHED] if watched else [])]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def lease(seconds: float, *folders: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "engine.node.probes", "lease", NONCE, str(seconds), *map(str, folders)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"held": True}
        try:
            yield process
        finally:
            process.kill()


def folder(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    (made / "attempts").mkdir(parents=True)
    return made


def test_what_there_is_of_the_way_to_a_path_is_found_below_a_folder_that_may_not_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, stat = folder(tmp_path, "closed"), os.stat

    def refusing(path: Any, **options: Any) -> os.stat_result:
        if closed in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    with monkeypatch.context() as other_user:
        other_user.setattr(os, "stat", refusing)
        found = nearest(closed / "attempts" / "1")
    assert found == closed


def test_a_released_lease_ends_what_it_held_and_reports_it(tmp_path: Path) -> None:
    mine, another = folder(tmp_path, "preflight-1"), folder(tmp_path, "a-run")
    with rank() as held, rank("another") as free, lease(60, mine, another) as holder:
        output, _ = holder.communicate("\n\nend\n", timeout=20)
        assert json.loads(output) == {"left": []}
        assert held.wait(5) == -signal.SIGKILL
        assert start_time(free.pid) is not None
        assert (mine.exists(), another.exists()) == (False, True)


def test_the_end_of_the_head_is_the_end_of_what_it_held(tmp_path: Path) -> None:
    mine = folder(tmp_path, "preflight-1")
    with rank() as held, lease(60, mine) as holder:
        assert holder.stdin is not None
        holder.stdin.close()
        assert held.wait(10) == -signal.SIGKILL
        assert holder.wait(10) == 0
        assert not mine.exists()


def test_silence_ends_it_and_heartbeats_do_not() -> None:
    with rank() as held, lease(3.0) as holder:
        assert holder.stdin is not None
        for _ in range(17):
            holder.stdin.write("\n")
            holder.stdin.flush()
            time.sleep(0.2)
        assert start_time(held.pid) is not None
        assert held.wait(30) == -signal.SIGKILL


def test_no_signal_but_kill_takes_a_lease_away() -> None:
    with rank() as held, lease(60) as holder:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            holder.send_signal(number)
        output, _ = holder.communicate("end", timeout=20)
        assert json.loads(output) == {"left": []}
        assert held.wait(5) == -signal.SIGKILL


def stale() -> list[dict[str, object]]:
    done = subprocess.run([sys.executable, "-m", "engine.node.probes", "stale"], capture_output=True, check=True)
    report = json.loads(done.stdout)
    assert report["marked_seen"] is True
    found: list[dict[str, object]] = report["stale"]
    return found


@pytest.mark.alone
def test_what_nobody_watches_is_stale_and_what_a_keeper_watches_is_not() -> None:
    with rank("left-behind", watched=False) as alone, rank("watched", watched=False) as kept, rank("watched"):
        pids = [pid for group in stale() for pid in group["pids"]]  # type: ignore[attr-defined]
        assert alone.pid in pids
        assert kept.pid not in pids


@pytest.mark.alone
def test_a_calibration_is_stale_only_when_its_lease_is_gone() -> None:
    nonce = f"measured-{os.getpid()}"
    argv = [sys.executable, "-m", "engine.node.probes", "lease", nonce, "60"]
    with rank(nonce, "engine.trainer.calibrate", watched=False) as measuring:
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as lease:
            assert lease.stdout is not None and lease.stdout.readline() == b'{"held": true}\n'
            assert [group for group in stale() if measuring.pid in group["pids"]] == []  # type: ignore[operator]
            # Not as a lease ends: that would end the calibration too.
            lease.kill()
        left = [group for group in stale() if measuring.pid in group["pids"]]  # type: ignore[operator]
        assert [group["pids"] for group in left] == [[measuring.pid]]


def test_a_probe_ends_with_its_parent() -> None:
    probe = "import time; from engine.node.processes import end_with_parent as end; end(); print(flush=True)"
    asker = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {probe + '; time.sleep(600)'!r}])"
    argv = [sys.executable, "-c", asker + "; print(p.pid, flush=True); p.wait()"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        # The probe's own line tells that it watches by now.
        pid = max(int(head.stdout.readline().strip() or 0) for _ in range(2))
        assert start_time(pid) is not None
        head.kill()
    wait_until(lambda: start_time(pid) is None, within_s=5)


def test_addresses_that_answer_and_that_do_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        open_, shut = (f"127.0.0.1:{each.getsockname()[1]}" for each in (listener, closed))
        assert network.probe_reach(open_, shut) == {"problems": [None, "Connection refused"]}
    assert network.own("127.0.0.1") is None
    assert "is not an address of this machine" in (network.own("192.0.2.1") or "")


def test_an_address_is_listened_on_until_stdin_ends() -> None:
    argv = [sys.executable, "-m", "engine.node.probes", "listen", "60", "127.0.0.1"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        (port,) = json.loads(process.stdout.readline())["listening"]
        assert network.reach("127.0.0.1", port) is None
        process.communicate(timeout=10)
        assert process.returncode == 0
        assert network.reach("127.0.0.1", port) is not None


@pytest.mark.parametrize("text", ["[]", "7", '{"model_type": ["x"]}', "[" * 100_000, '"\\ud800"'])
def test_a_model_with_any_configuration_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    json.dumps(model_files.probe_model(str(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_listeners_count_in_the_kernels_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        inode = os.fstat(listener.fileno()).st_ino
        row = "{}: 0100007F:7E43 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1"
        for state, pid in (("01", None), ("0A", os.getpid())):
            (tmp_path / "net" / "tcp").write_text(f"  sl  local_address\n{row.format(0, state, inode)}\n")
            monkeypatch.setattr(processes, "_PROC", tmp_path)
            rows = processes.linux_tcp()
            monkeypatch.undo()
            monkeypatch.setattr(network, "linux_tcp", lambda rows=rows: rows)
            assert network._linux_holder(0x7E43) == pid


def test_lsofs_pid_is_read_from_its_field_output() -> None:
    assert network.lsof_pid("p812\nf5\nf6\n") == 812
    assert network.lsof_pid("") is None


def test_a_port_that_is_bound_at_one_address_is_not_free_at_all_of_them() -> None:
    """On BSD SO_REUSEADDR hides even one that listens; on Linux one that does not listen yet."""
    with socket.socket() as theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        theirs.bind(("127.0.0.1", 0))
        port = theirs.getsockname()[1]
        assert not network.bindable("", port)
    assert network.bindable("", port)


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (("darwin", errno.EPERM, "Documents/data"), True),
        (("darwin", errno.EPERM, "Library/Mobile Documents/x"), True),
        (("darwin", errno.EACCES, "Documents/data"), False),
        (("darwin", errno.EPERM, "mlx/data"), False),
        (("linux", errno.EPERM, "Documents/data"), False),
    ],
)
def test_what_macos_keeps_private_names_full_disk_access(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: tuple[str, int, str], named: bool
) -> None:
    """Simulated: macOS answers EPERM there."""
    platform, code, below = case
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / below / "train.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("{}")

    def refusing(*_: object, **__: object) -> None:
        raise PermissionError(code, os.strerror(code))

    monkeypatch.setattr(dataset, "open_regular", refusing)
    problem = dataset.check_file(path, {})["problem"]
    assert problem.startswith(f"{path} cannot be read: {os.strerror(code)}")
    assert ("allow full disk access for remote users" in problem) is named


def test_a_private_folder_of_macos_is_not_permitted_by_a_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "Documents").mkdir()

    def refusing(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(storage, "write", refusing)
    request = {
        "workdir": "/",
        "directory": str(tmp_path / "Documents/out"),
        "roots": [str(tmp_path)],
        "runs": str(tmp_path),
    }
    report = storage.probe_storage(json.dumps({**request, "resume": None, "needed": 0}))
    assert "allow full disk access" in report["fault"]
    assert (report["permit"], report["own"]) == (None, None)


def test_the_weights_own_type_is_in_their_files_whatever_the_configuration_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    assert model_files.probe_configuration(str(tmp_path))["dtype"] is None, "there are no weights yet"
    tensors = {"norm": ("F32", 4, 4), "packed": ("U32", 400, 4), "a": ("BF16", 10, 2)}
    header, at = {}, 0
    for name, (dtype, elements, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [elements], "data_offsets": [at, at := at + elements * size]}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    assert model_files.probe_configuration(str(tmp_path))["dtype"] == "bfloat16"
    (tmp_path / "model-2.safetensors").write_bytes(b"cut")
    assert model_files.probe_configuration(str(tmp_path))["dtype"] is None


def test_an_id_of_the_hugging_face_hub_is_found_in_its_cache_or_its_download_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for folder, kind, holding in (
        ("mlx-community/Qwen3-0.6B", "model", "config.json"),
        ("mlx-community/wikisql", "dataset", "train.jsonl"),
    ):
        path = tmp_path / folder
        download = f"hf download {folder} --repo-type {kind} --local-dir {path}"
        assert did_you_mean(path, holding) == f"; from the Hugging Face Hub: {download}"
        cached = tmp_path / "hf" / "hub" / f"{kind}s--{folder.replace('/', '--')}" / "snapshots" / "0a1b"
        cached.mkdir(parents=True)
        assert "hf download" in did_you_mean(path, holding), "the snapshot is empty"
        (cached / holding).write_text("{}")
        assert did_you_mean(path, holding) == f", did you mean {cached}?"
        path.parent.mkdir(exist_ok=True)
        assert did_you_mean(path, holding) == "", "a folder of one's own that lacks this one"
        path.parent.rmdir()


def test_a_missing_validation_has_the_checksum_that_a_trainer_reports(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "tower"}\n')
    keys = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text", "data": {}}
    files = {"files": ["train.jsonl", "valid.jsonl"], "packages": []}
    request = {"data": str(tmp_path), "model": str(tmp_path), "options": {**keys, "max_seq_length": 64}, **files}
    inputs = probe_inputs(json.dumps(request))["inputs"]
    there = [JsonlRows(tmp_path / name).checksum for name in files["files"]]
    assert [inputs[name] for name in files["files"]] == [crc32_text(checksum) for checksum in there]
