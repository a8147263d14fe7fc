"""A console that only reads, and the same in a browser: who may see it, and that nothing can be done there."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import operator
import shlex
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import aiohttp
import pytest
from aiohttp import web
from PIL import Image

from engine.api import Engine, ReadOnlyEngine
from engine.api.engine import PARTS
from engine.errors import InputError
from engine.models import CheckResult, CheckStatus
from engine.store.store import Store
from tests.tui import fake_engine
from tests.tui.browser import opened as opened_page
from tests.tui.commands import FLIGHTDECK, environment, flightdeck
from tests.tui.conftest import SIZE, Console, opened
from tests.tui.fake_engine import FakeEngine
from tests.tui.test_actions import RUNNING
from tests.unit.run.run_maker import MadeRun
from tui.actions import ACTIONS, action_for, bar, keys
from tui.commands.web import _Console, _Window
from tui.screens.help import lines
from tui.state import VIEWS, DeckState
from tui.widgets import checks_pane, node_detail, run_summary

ACTING = {
    *("enqueue", "item_up", "item_down", "hold_item", "cancel_item"),
    *("launch", "abort", "use", "again", "edit", "recheck", "demo", "chat", "calibrate", "calibrate_quick", "scaling"),
    *("fix", "skip", "shell", "tag_run", "note_run", "delete_run", "export_chart", "save"),
    *("setup", "notify_test", "switch"),
}


def test_what_changes_something_is_not_offered() -> None:
    reading = DeckState(read_only=True)
    assert {action.id for action in ACTIONS if not action.offered(reading)} == ACTING
    assert all(action.offered(DeckState()) for action in ACTIONS)


@pytest.mark.parametrize("view", VIEWS)
def test_no_key_means_such_an_action_anywhere(view: str) -> None:
    for pane in ("nodes", "preflight", "calibration", "run", "logs", "history"):
        state = replace(RUNNING, view=view, pane=pane, run="demo", read_only=True)
        meant = [action for key in keys() if (action := action_for(key, state)) is not None]
        assert not ACTING.intersection(action.id for action in (*meant, *bar(state)))


@pytest.mark.parametrize("read_only", [False, True])
def test_a_text_that_names_such_a_key_is_left_out(read_only: bool) -> None:
    check = CheckResult(name="worker_layer", status=CheckStatus.FAIL, summary="no", fix_command="true")
    pending = check.model_copy(update={"status": CheckStatus.PENDING})
    state = DeckState(read_only=read_only, config=fake_engine.configuration(), facts={}, checks=(pending,))
    kept = fake_engine.aborted()
    texts = [checks_pane.verdict(state), checks_pane._detail(check, state, 80).plain]
    texts += [line.plain for line in run_summary.left(state, kept, 80, tall=True)]
    texts += [line.plain for line in node_detail._node(state, "local-0", 80)]
    texts += [run_summary.next_key(state, fake_engine.task("fuse"), 80).plain]
    named = ("r here runs it", "x runs it", "s skips", "R resumes", "u F fetches", "r probes", "u p publishes")
    assert [key for key in named if any(key in text for text in texts)] == (
        [] if read_only else [*named[:4], *named[5:]]
    )


@pytest.mark.parametrize("size", SIZE)
async def test_a_key_that_would_change_something_says_why_it_does_not(fake: FakeEngine, size: tuple[int, int]) -> None:
    fake.add(fake_engine.running(), fake_engine.failed())
    async with opened(fake, size=size, read_only=True) as console:
        await console.shows("step 41/60")
        assert "read-only" in console.screen and "ctrl+x" not in console.screen
        await console.press("n", "ctrl+x", "e", "5", "j", "T", "ctrl+k", "u", "R")
        refused = [text.removesuffix(": this console only reads") for text in console.notifications]
        assert refused == ["queue", "abort", "edit", "tag", "delete", "use", "again"] and console.on_deck
        assert all(action.id not in ACTING for action in ACTIONS if action.help in palette(console))
        help_text = "\n".join(line.plain for line in lines(console.app.state, 200))
        assert all((action.help in help_text) is (action.id not in ACTING) for action in ACTIONS)
        await console.press("escape", "y")
        await console.until(lambda: bool(console.app.clipboard))
    done = (fake.launched, fake.aborted, fake.annotated, fake.deleted, fake.started)
    assert done == ([], [], [], [], []) and not (fake.home / "saved").exists()


def palette(console: Console) -> list[str]:
    return [entry.help for entry in console.app.palette_entries()]


async def test_the_engine_of_such_a_console_refuses_what_slips_through(fake: FakeEngine) -> None:
    fake.add(fake_engine.running())
    async with opened(fake, read_only=True) as console:
        app = console.app
        for request in (app.client.launch(fake_engine.configuration()), app.client.abort("demo", now=True)):
            await request
        assert (fake.launched, fake.aborted) == ([], [])
        await console.until(lambda: any("this console only reads" in text for text in console.notifications))


LEFT = {
    *("close", "load_config", "load_grid", "notify", "report_damage", "queue.snapshot", "models.list", "models.each"),
    *("nodes.is_accepted", "nodes.programs", "nodes.last_facts", "nodes.probe_each", "nodes.telemetry"),
    *("nodes.topology", "nodes.network_plan", "runs.all", "runs.find", "runs.watch", "runs.series"),
    *("comparisons.compare", "launches.differences", "launches.plan"),
    *("calibrations.latest", "calibrations.latest_scaling", "calibrations.predict"),
}
"""The engine's public names that a console which only reads may use."""


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


async def test_of_the_engine_only_what_reads_is_left(home: Path) -> None:
    acting = Engine(home)
    engine = ReadOnlyEngine(acting)
    assert engine.runs.all() == []
    names = public(Engine) - set(PARTS)
    names |= {f"{part}.{name}" for part in PARTS for name in public(getattr(acting, part))}
    assert names > LEFT and "store" in names and "runs.delete" in names
    for name in LEFT:
        assert callable(operator.attrgetter(name)(engine))
    for name in names - LEFT:
        with pytest.raises(InputError, match=f"{name}: this console only reads"):
            operator.attrgetter(name)(engine)(*[fake_engine.configuration()] * (name == "test_notifications"))
    with mock.patch.object(acting.fleet, "close") as closed:
        await engine.close()
    closed.assert_awaited_once()


class Window(_Window):
    """Keeps the server's tasks, each for a page."""

    def __init__(self, port: int) -> None:
        super().__init__(["true"], "127.0.0.1", port)
        self.pages = set[asyncio.Task[object]]()

    async def handle_websocket(self, request: web.Request) -> object:
        task = asyncio.current_task()
        assert task is not None
        self.pages.add(task)
        return await super().handle_websocket(request)


@dataclass
class Served:
    window: Window
    http: aiohttp.ClientSession

    async def status(self, path: str, **headers: str) -> int:
        async with self.http.get(self.window.public_url + path, headers=headers) as answer:
            status: int = answer.status
            return status

    @contextlib.asynccontextmanager
    async def console(self, *command: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A page of a console that `command` stands for."""
        self.window.command = f"exec {shlex.join(command)}"
        async with self.http.ws_connect(f"{self.window.url}ws") as websocket:
            yield websocket
        ended, going_on = await asyncio.wait(self.window.pages, timeout=5)
        assert ended and not going_on


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The server itself; a console that it starts ends at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        window = Window(listener.getsockname()[1])
        runner = web.AppRunner(await window.application(), access_log=None)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        async with aiohttp.ClientSession() as session:
            yield Served(window, session)
        await runner.cleanup()


async def test_the_address_is_of_one_start_and_of_this_machine_alone(served: Served) -> None:
    window, path = served.window, served.window.url.removeprefix(served.window.public_url)
    another = _Window(["true"], "127.0.0.1", 1)
    assert another.url.split("/")[3] != window.url.split("/")[3] and len(window.url.split("/")[3]) == 43
    assert await served.status(path) == 200
    assert await served.status(f"{path}static/js/textual.js") == 200
    for wrong in ("/", "/ws", f"/{'x' * 43}/", f"{path[:-2]}/", "/static/js/textual.js", "/%ff/", f"/{'x' * 43}/ws"):
        assert await served.status(wrong) == 404, wrong
    port = window.public_url.rpartition(":")[2]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"localhost:{port}"):
        assert await served.status(path, Host=host) == 403, host
    for origin in ("http://evil.example", "null", f"http://localhost:{port}"):
        for place in (path, f"{path}ws"):
            assert await served.status(place, Origin=origin) == 403, origin
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await served.http.ws_connect(f"{window.url}ws", origin=origin)
    async with served.http.get(window.url) as answer:
        page = await answer.text()
        assert window.url.replace("http", "ws", 1) + "ws" in page
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    async with served.http.ws_connect(f"{window.url}ws", origin=window.public_url) as websocket:
        assert websocket.closed is False


FRAME = r"echo __GANGLION__; printf 'D\0\0\0\1x'; "
"""A shell's part of a console: it paints one letter."""
WAITS = ("sh", "-c", FRAME + "exec head -c 1")
"""A console that ends at the first message, as at the one to quit."""


@pytest.mark.parametrize("script", ["exit 3", FRAME + "exit 3", FRAME + "kill -9 $$"], ids=["start", "exit", "kill"])
async def test_a_page_is_closed_when_its_console_fails(
    served: Served, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with served.console("sh", "-c", f"echo trouble >&2; {script}") as websocket:
        messages = [await websocket.receive(5) for _ in range(2 if FRAME in script else 1)]
        assert [message.data for message in messages[:-1]] == [b"x"] * (FRAME in script)
        assert (messages[-1].type, messages[-1].extra) == (aiohttp.WSMsgType.CLOSE, "the console has ended")
    assert capfd.readouterr() == ("", "trouble\n")


async def test_a_console_whose_output_cannot_be_read_is_killed(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async with served.console("sh", "-c", FRAME + r"head -c 1 >&2; printf 'M\0\0\0\1x'; exec sleep 60") as websocket:
        (console,) = served.window._consoles
        assert (await websocket.receive(5)).data == b"x"
        await websocket.send_str('["focus"]')
        assert (await websocket.receive(5)).type is aiohttp.WSMsgType.CLOSE
        assert await asyncio.wait_for(console._process.wait(), 5) == -9
    (record,) = caplog.records
    assert record.exc_info is None and "JSONDecodeError" in record.message and "\n" not in record.message


async def test_a_console_that_cannot_be_started_is_reported(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(_Console, "_open_app_process", side_effect=OSError("no more processes")):
        async with served.console("true") as websocket:
            assert (await websocket.receive(5)).type is aiohttp.WSMsgType.CLOSED
    (record,) = caplog.records
    assert record.exc_info is None and "no more processes" in record.message
    assert served.window._consoles == set()


async def test_the_consoles_are_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.commands.web.MOST_CONSOLES", 1)
    async with served.console(*WAITS) as websocket:
        assert (await websocket.receive(5)).data == b"x"
        with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
            await served.http.ws_connect(f"{served.window.url}ws")
    async with served.console(*WAITS) as websocket:
        assert (await websocket.receive(5)).data == b"x"


@pytest.mark.parametrize("message", ["{bad", "{}", '["stdin"]', '["stdin", 5]', r'["stdin", "\ud800"]'])
async def test_what_is_no_message_of_the_page_closes_it(
    served: Served, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served.console(*WAITS) as websocket:
        assert (await websocket.receive(5)).data == b"x"
        await websocket.send_str(message)
        assert (await websocket.receive(5)).data == aiohttp.WSCloseCode.UNSUPPORTED_DATA
    assert caplog.records == []


@pytest.mark.parametrize(
    ("request_line", "hosts", "status"),
    [("OPTIONS *", 1, 404), ("CONNECT 127.0.0.1:1", 1, 404), ("GET /", 2, 400), ("GET / /", 1, 400)],
)
async def test_an_odd_request_is_answered_and_not_reported(
    served: Served, request_line: str, hosts: int, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    address = served.window.public_url.partition("//")[2]
    reader, writer = await asyncio.open_connection(*address.split(":"))
    headers = f"Host: {address}\r\n" * hosts
    writer.write(f"{request_line} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert int(answer.split()[1]) == status
    assert caplog.records == []


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("127.0.0.1", 443, "http://127.0.0.1:443"),
        ("127.0.0.1", 80, "http://127.0.0.1"),
        ("0:0:0:0:0:0:0:1", 8095, "http://[::1]:8095"),
        ("localhost", 8095, "http://localhost:8095"),
    ],
)
def test_the_address_is_written_as_in_host_headers(host: str, port: int, url: str) -> None:
    assert _Window(["true"], host, port).public_url == url


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.2", "::", "ultra.local", ""])
def test_no_address_that_others_reach_is_listened_on(home: Path, host: str) -> None:
    done = flightdeck(home, "web", "--host", host)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert (
        done.err.startswith(f"flightdeck: {host} is no loopback address") and "ssh -L 8095:127.0.0.1:8095" in done.err
    )


def test_a_port_that_is_taken_is_named(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = flightdeck(home, "web", "--port", str(port))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"127.0.0.1:{port} cannot be listened on" in done.err and "--port 0 takes a free port" in done.err


def test_without_the_extra_the_one_command_is_named(home: Path) -> None:
    modules = {name: None for name in sys.modules if name.startswith("textual_serve")}
    with mock.patch.dict(sys.modules, {"textual_serve": None, **modules}):
        del sys.modules["tui.commands.web"]
        done = flightdeck(home, "web")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "pip install 'mlx-flightdeck[web]'" in done.err


@pytest.mark.needs("chromium-headless-shell")
async def test_in_a_browser_a_run_is_looked_at_and_not_touched(home: Path, tmp_path: Path) -> None:
    run = MadeRun(home, name="night").state("preflight", "launching").attempt().state("running", "finishing")
    run.state("succeeded", reason="completed").close()
    Store(home).put_run(run.plan.record())
    before = {path: path.stat().st_mtime_ns for path in run.directory.path.rglob("*")}
    server = await asyncio.create_subprocess_exec(
        FLIGHTDECK, "web", "--port", "0", "--json", env=environment(home), stdout=PIPE, stderr=PIPE, cwd=tmp_path
    )
    assert server.stdout is not None and server.stderr is not None
    try:
        url = json.loads(await server.stdout.readuntil(b"}"))["url"]
        async with opened_page(tmp_path / "browser", url) as page:
            # Without a configuration the history comes first.
            await page.until(lambda: "read-only" in page.text and "space mark" in page.text and run.id in page.text)
            for key, word in (("T", "tag"), ("n", "launch"), ("R", "again")):
                await page.press_until(
                    key,
                    lambda words=f"{word}: this console only reads": words in page.text,  # type: ignore[misc]
                )
            picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
            assert await page.value("document.body.className") == "-loaded -first-byte"
            assert len(picture.getcolors(picture.width * picture.height) or ()) > 50
            consoles = _children(server.pid)
            assert len(consoles) == 1
            assert [address.split("/")[2] for address in page.refused] == ["fonts.googleapis.com"]
            server.send_signal(2)
            assert await asyncio.wait_for(server.wait(), 30) == 0
        assert _running(*consoles) == []
        assert (await server.stdout.read(), await server.stderr.read()) == (b"\n", b"")
        assert {path: path.stat().st_mtime_ns for path in before} == before
        assert Engine(home).runs.listed(run.id).tags == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()


def _children(pid: int) -> list[str]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return listed.stdout.split()


def _running(*pids: str) -> list[str]:
    listed = subprocess.run(["ps", "-o", "pid=", "-p", ",".join(pids)], capture_output=True, text=True, check=False)
    return listed.stdout.split()
