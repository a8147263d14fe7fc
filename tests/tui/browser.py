"""Headless Chromium, driven by its DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.needs import PATH

PATIENCE_S = 60.0
_PROGRAM = "chromium-headless-shell"
_BINARY = 2
"""The opcode of a frame of bytes (RFC 6455)."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Page:
    """One page, and the text that its websocket has received."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._received = bytearray()
        self.refused: list[str] = []
        """The addresses of what was asked for and not loaded."""
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            document, name = message.json(), message.json().get("method")
            if "id" in document:
                self._answers.pop(document["id"]).set_result(document)
            elif name == "Network.webSocketFrameReceived" and document["params"]["response"]["opcode"] == _BINARY:
                self._received += base64.b64decode(document["params"]["response"]["payloadData"])
            elif name == "Network.requestWillBeSent":
                self.refused.append(document["params"]["request"]["url"])
            elif name == "Network.responseReceived":
                self.refused.remove(document["params"]["response"]["url"])

    @property
    def text(self) -> str:
        """What the console has drawn since the last `forget`."""
        return _ESCAPES.sub("", self._received.decode(errors="replace"))

    def forget(self) -> None:
        self._received.clear()

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], PATIENCE_S)
        result: dict[str, Any] = answer.get("result", {})
        return result

    async def value(self, expression: str) -> Any:
        return (await self.ask("Runtime.evaluate", expression=expression))["result"].get("value")

    async def press(self, key: str) -> None:
        await self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def press_until(self, key: str, condition: Callable[[], bool]) -> None:
        """As a person would: a key that comes before the page takes keys is lost, and pressed again."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self.press(key)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.until(condition), 3.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.02)

    async def screenshot(self) -> bytes:
        return base64.b64decode((await self.ask("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def opened(folder: Path, url: str, *, size: tuple[int, int] = (1180, 720)) -> AsyncIterator[Page]:
    """A page of a browser of its own, whose files are in `folder`; both are gone at the end."""
    options = ["--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--hide-scrollbars"]
    # WebGL without a GPU: the terminal of the page draws by it.
    options += ["--use-angle=swiftshader", "--enable-unsafe-swiftshader", f"--window-size={size[0]},{size[1]}"]
    environment = {"PATH": PATH, "HOME": str(folder)}
    browser = await asyncio.create_subprocess_exec(
        _PROGRAM, *options, "about:blank", env=environment, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        port_file = folder / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not port_file.exists() or not port_file.read_text().strip():
                await asyncio.sleep(0.02)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (target,) = [entry for entry in await answer.json() if entry["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                await page.ask("Network.enable")
                await page.ask("Page.enable")
                await page.ask("Page.navigate", url=url)
                yield page
    finally:
        with suppress(ProcessLookupError):  # The program may be a script that starts the browser.
            os.killpg(browser.pid, signal.SIGTERM)
        await browser.wait()
