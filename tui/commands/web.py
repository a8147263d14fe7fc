"""web: the console in a browser of this machine, by textual-serve, which starts a console for each websocket.

Whoever has the address can look, and nobody can act: each console only reads. The address has a token of this start.
A page of another site, or a name that was made to lead here (DNS rebinding), is refused by Host and Origin."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import secrets
import shlex
import socket
import sys
from typing import Any, Final

from engine.api import Engine, ExitCode
from engine.errors import InputError
from tui.commands.terminal import Lines, accepted_config, config_file, print_json

try:
    from aiohttp import WSCloseCode
    from aiohttp import web as http
    from aiohttp.http import HttpProcessingError
    from textual_serve.app_service import AppService
    from textual_serve.server import Server, to_int
except ImportError as missing:
    todo = "pip install 'mlx-flightdeck[web]'"
    raise InputError("the console in a browser needs textual-serve", why=str(missing), todo=todo) from missing

LEAVING_S: Final = 5.0
"""How long a console may take to end: it closes its connections to the nodes first."""
MOST_CONSOLES: Final = 16
"""How many are shown at once: each is a process."""
_SMALLEST: Final = {"width": 80, "height": 24}
"""Where a browser does not tell."""
_HEADERS: Final = {
    # The page asks for a font of Google's: nothing is loaded from elsewhere.
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; connect-src {}; img-src 'self' data:; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

_FOCUS: Final = 'addEventListener("load", () => document.querySelector("textarea").focus())'


def web(options: argparse.Namespace, engine: Engine) -> int:
    """Serve until ctrl+c or TERM."""
    command = [sys.executable, "-P", "-c", "from tui.cli import main; raise SystemExit(main())", "--read-only"]
    if options.config is not None or config_file(options).exists():
        command += ["-c", str(accepted_config(options, engine).file)]
        command += [f"--set={text}" for text in options.set]
    with _listening(options.host, options.port) as listener:
        window = _Window(command, options.host, listener.getsockname()[1])
        if options.json:
            print_json({"url": window.url})
            sys.stdout.flush()
        else:
            lines = Lines()
            lines.say(window.url)
            lines.say("whoever has this address can look, and nobody can act; ctrl+c ends it")
        os.environ["PYTHONUTF8"] = "1"  # as the browser has it, whatever the locale
        # No log of requests: it would have the token.
        http.run_app(window.application(), sock=listener, print=None, access_log=None, shutdown_timeout=1.0)
    return ExitCode.OK


def _listening(host: str, port: int) -> socket.socket:
    """Raises InputError for an address that other machines reach, and where the port is taken."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        todo = f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, and the same address there"
        raise InputError(f"{host} is no loopback address", why="the window is for this machine alone", todo=todo)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        todo = "--port 0 takes a free port"
        raise InputError(f"{host}:{port} cannot be listened on", why=error, todo=todo) from error


def _one_line(record: logging.LogRecord) -> bool:
    """A fault of the server without its traceback; nothing of a malformed request, which has its answer."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error!r}", (), None
    return not isinstance(error, HttpProcessingError)


class _Console(AppService):  # type: ignore[misc]
    """Closes its page when the process ends, however it does."""

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            await self.remote_close()

    async def _open_app_process(self, width: int = 80, height: int = 24) -> asyncio.subprocess.Process:
        """Its stderr is this process's: AppService would write it to stdout, behind the address, and lose the end."""
        environment = self._build_environment(width, height)
        self._process = process = await asyncio.create_subprocess_shell(
            self.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment
        )
        self._stdin = process.stdin
        process.stderr = asyncio.StreamReader()
        process.stderr.feed_eof()
        return process


class _Window(Server):  # type: ignore[misc]
    """Guards the pages and the websocket, and ends the consoles with itself."""

    def __init__(self, command: list[str], host: str, port: int) -> None:
        # exec: else a shell would stand between the consoles and this process, whose end they notice.
        address = host if host == "localhost" else str(ipaddress.ip_address(host))  # as a browser has it in Host
        address = f"[{address}]" if ":" in address else address
        url = f"http://{address}" if port == 80 else f"http://{address}:{port}"
        super().__init__(f"exec {shlex.join(command)}", address, port, title="MLX Flight Deck", public_url=url)
        self._token = secrets.token_urlsafe(32)
        self._consoles = set[Any]()

    @property
    def url(self) -> str:
        return f"{self.public_url}/{self._token}/"

    async def application(self) -> Any:
        logging.getLogger("aiohttp.server").addFilter(_one_line)
        outer = http.Application(middlewares=[self._guard])
        outer.add_subapp(f"/{self._token}", await self._make_app())
        outer.on_response_prepare.append(self._protect)
        return outer

    @http.middleware  # type: ignore[untyped-decorator]
    async def _guard(self, request: Any, handler: Any) -> Any:
        host = self.public_url.partition("//")[2]
        if request.headers.get("Host") != host or request.headers.get("Origin", self.public_url) != self.public_url:
            raise http.HTTPForbidden(text="open the address that flightdeck web has printed")
        given = request.path[1:].partition("/")[0]  # No path but * or nothing, with OPTIONS and CONNECT.
        if not secrets.compare_digest(given.encode(errors="replace"), self._token.encode()):
            raise http.HTTPNotFound
        return await handler(request)

    async def _protect(self, request: Any, response: Any) -> None:
        websocket = self.public_url.replace("http", "ws", 1)
        response.headers.update({name: text.format(websocket) for name, text in _HEADERS.items()})

    async def handle_index(self, request: Any) -> Any:
        """The keys go to the console without a click."""
        page = await super().handle_index(request)
        page.text = page.text.replace("</body>", f"<script>{_FOCUS}</script></body>")
        return page

    async def handle_websocket(self, request: Any) -> Any:
        if len(self._consoles) >= MOST_CONSOLES:
            raise http.HTTPServiceUnavailable(text=f"{MOST_CONSOLES} consoles are open: close a tab")
        websocket = http.WebSocketResponse(heartbeat=15)
        console = _Console(
            self.command,
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=functools.partial(websocket.close, message=b"the console has ended"),
            download_manager=self.download_manager,
        )
        self._consoles.add(console)
        try:
            await websocket.prepare(request)
            await console.start(*(to_int(request.query.get(name, ""), least) for name, least in _SMALLEST.items()))
            await self._process_messages(websocket, console)
        finally:
            await self._end(console)
        return websocket

    async def _process_messages(self, websocket: Any, console: Any) -> None:
        try:
            await super()._process_messages(websocket, console)
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError):  # Not the page's message.
            await websocket.close(code=WSCloseCode.UNSUPPORTED_DATA)

    async def _end(self, console: Any) -> None:
        """Ask it to quit, and wait for its end; then it is killed."""
        process = console._process
        if console not in self._consoles:
            return
        self._consoles.remove(console)
        if process is None:
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVING_S):
                    await console.stop()
                    await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def on_startup(self, app: Any) -> None:
        """Textual-serve's own prints its logo."""

    async def on_shutdown(self, app: Any) -> None:
        await asyncio.gather(*map(self._end, tuple(self._consoles)), return_exceptions=True)
