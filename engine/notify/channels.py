"""The channels of [notify], by the standard library: a desktop's notifications, a command, webhooks; and Apprise.

A channel gets three tries when it does not answer or has a fault of its own, and one when it refuses. No redirect is
followed: what is sent is for the address that was written down. Answers and faults are shown without addresses, which
are often secrets, without the values of variables, and without the job's secrets."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from engine.config.formats import web_address_form
from engine.config.models import Config, WebhookConfig
from engine.node.processes import start_session
from engine.security.redact import Redactor
from engine.security.sanitise import last_line, plain
from engine.snapshots import ChannelAnswer, Notification

_PAUSES_S = (1.0, 3.0)
"""Before the second and the third try."""
_HTTP_LIMIT_S = 10.0
_COMMAND_LIMIT_S = 30.0
_TOTAL_LIMIT_S = 45.0
"""For all channels together: a server may answer byte by byte, and a name may not be resolved for minutes."""
_ANSWER_LIMIT = 200
_DISCORD_LIMIT = 2_000
_DISPLAY = (
    *("-e", "on run argv"),
    *("-e", "display notification (item 2 of argv) with title (item 1 of argv)"),
    *("-e", "end run"),
)


class NotSentError(Exception):
    def __init__(self, why: str, *, again: bool = False) -> None:
        """`again`: another try may succeed."""
        super().__init__(why)
        self.again = again


Send = Callable[[Notification], str]
"""Returns what came back. Raises NotSentError."""


def channels(config: Config) -> dict[str, Send]:
    notify = config.notify
    senders: dict[str, Send] = {"desktop": _show_on_desktop} if notify.desktop else {}
    if notify.command:
        folder = config.file.parent if config.file is not None else Path.home()
        senders["command"] = functools.partial(_run, notify.command, folder)
    posts = [functools.partial(_post, webhook) for webhook in notify.webhooks]
    calls = [functools.partial(_call_apprise, address) for address in notify.apprise]
    senders |= {f"webhook {number}": send for number, send in enumerate(posts, 1)}
    return senders | {f"apprise {number}": send for number, send in enumerate(calls, 1)}


def redactor_for(config: Config) -> Redactor:
    """Takes out the job's secrets, and addresses and tokens of notifications."""
    written = [webhook.url for webhook in config.notify.webhooks if not webhook.url.startswith("env:")]
    values = {f"address {number}": url for number, url in enumerate(written)}
    values |= {name: value for name in config.notify.variables if (value := os.environ.get(name))}
    return Redactor({**config.job.env, **values})


def send_to_all(config: Config, notification: Notification) -> list[ChannelAnswer]:
    """Send by every channel at the same time. Blocking, for at most _TOTAL_LIMIT_S."""
    senders, redactor, answers = channels(config), redactor_for(config), dict[str, ChannelAnswer]()

    def send(name: str) -> None:
        answers[name] = _send(name, senders[name], notification, redactor)

    threads = [threading.Thread(target=send, args=(name,), name=f"notify {name}", daemon=True) for name in senders]
    deadline = time.monotonic() + _TOTAL_LIMIT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"it did not answer within {_TOTAL_LIMIT_S:.0f} s"
    return [answers.get(name) or ChannelAnswer(name, False, late) for name in senders]


def _send(name: str, send: Send, notification: Notification, redactor: Redactor) -> ChannelAnswer:
    for pause in (*_PAUSES_S, None):
        try:
            return ChannelAnswer(name, True, plain(redactor(send(notification)), _ANSWER_LIMIT))
        except NotSentError as fault:
            if pause is None or not fault.again:
                return ChannelAnswer(name, False, plain(redactor(str(fault)), _ANSWER_LIMIT))
            time.sleep(pause)
    raise AssertionError("the last try returns")


def queue_empty(home: Path, config: Config) -> list[ChannelAnswer]:
    """Tell that nothing waits in the queue of `home` any more, where [notify] of `config` wants it. Blocking."""
    if (event := "queue_empty") not in config.notify.on:
        return []
    title, text = "the queue is empty", f"every queued run on {socket.gethostname()} has ended ({home})"
    return send_to_all(config, Notification(event, title, text, datetime.now(UTC)))


def trial() -> Notification:
    return Notification("end", "a test of flightdeck", f"sent from {socket.gethostname()}", datetime.now(UTC))


def document(notification: Notification) -> dict[str, Any]:
    """As a command and a webhook of format json get it."""
    fields = {name: getattr(notification, name) for name in ("event", "title", "text", "run")}
    return {**fields, "at": notification.at.isoformat()}


def _show_on_desktop(notification: Notification) -> str:
    texts = [notification.title, notification.text]
    if program := shutil.which("osascript"):
        return _run_program([program, *_DISPLAY, *texts], Path.home(), b"")
    if program := shutil.which("notify-send"):
        return _run_program([program, "--app-name=flightdeck", "--", *texts], Path.home(), b"")
    raise NotSentError("this machine has neither osascript (macOS) nor notify-send")


def _run(words: Sequence[str], folder: Path, notification: Notification) -> str:
    fields = document(notification)
    variables = {f"FLIGHTDECK_{name.upper()}": str(value) for name, value in fields.items()}
    return _run_program(words, folder, json.dumps(fields).encode() + b"\n", variables)


def _run_program(words: Sequence[str], folder: Path, given: bytes, variables: Mapping[str, str] = {}) -> str:
    """Files in place of pipes: a child that it leaves behind keeps them, and nobody waits for that."""
    name = Path(words[0]).name
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
        source.write(given)
        source.seek(0)
        try:
            process = start_session(words, folder, output, stdin=source, env={**os.environ, **variables})
        except OSError as error:
            raise NotSentError(f"{name} cannot be started: {error.strerror}") from error
        try:
            code = process.wait(_COMMAND_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise NotSentError(f"{name} had not ended after {_COMMAND_LIMIT_S:.0f} s, and was killed") from None
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
        printed = last_line(output.read().decode(errors="replace"))
    if code:
        raise NotSentError(f"{name} ended with {code}" + (f": {printed}" if printed else ""))
    return f"{name} ran"


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """None makes the redirect an HTTPError."""


def _post(webhook: WebhookConfig, notification: Notification) -> str:
    address = _value(webhook.url)
    if web_address_form(address) is not None:
        raise NotSentError(f"the value of {webhook.url} is no http:// or https:// address")
    host = urlsplit(address).hostname
    body, headers = _FORMATS[webhook.format](notification)
    if webhook.token is not None:
        headers["Authorization"] = f"Bearer {_value(webhook.token)}"
    try:
        request = Request(address, body, {**headers, "User-Agent": "flightdeck"}, method="POST")
        with build_opener(_NoRedirect).open(request, timeout=_HTTP_LIMIT_S) as answer:
            return f"{host} answered {answer.status}"
    except HTTPError as error:
        with error:
            raise _refusal(str(host), error) from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        why = f"no answer within {_HTTP_LIMIT_S:.0f} s" if isinstance(reason, TimeoutError) else reason
        raise NotSentError(f"{host} cannot be reached: {getattr(why, 'strerror', None) or why}", again=True) from None
    except ValueError:
        # Whose text has the value.
        raise NotSentError("its url or token has characters that HTTP does not allow") from None


def _refusal(host: str, error: HTTPError) -> NotSentError:
    if 300 <= error.code < 400:
        target = urlsplit(error.headers.get("Location", "")).hostname or "another place"
        return NotSentError(f"{host} redirects to {target}, which is not followed: write down that url")
    text = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = last_line(error.read(500).decode(errors="replace"))
    why = f"{host} answered {error.code}" + (f": {text}" if text else "")
    return NotSentError(why, again=error.code >= 500 or error.code == 429)


def _value(text: str) -> str:
    """Raises NotSentError where the variable is not set."""
    name = text.removeprefix("env:")
    if name == text:
        return text
    if not (value := os.environ.get(name, "").strip()):
        raise NotSentError(f"the variable {name} is not set in the environment that launched")
    return value


def _as_json(body: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    return json.dumps(body).encode(), {"Content-Type": "application/json"}


def _ntfy(notification: Notification) -> tuple[bytes, dict[str, str]]:
    """https://docs.ntfy.sh/publish: a header that is not ASCII is encoded as RFC 2047 has it."""
    title = notification.title
    if not title.isascii():
        title = f"=?UTF-8?B?{base64.b64encode(title.encode()).decode()}?="
    priority = "4" if notification.event == "failure" else "3"
    return notification.text.encode(), {"Title": title, "Priority": priority, "Content-Type": "text/plain"}


def _slack(notification: Notification) -> tuple[bytes, dict[str, str]]:
    """These three characters of mrkdwn are escaped: docs.slack.dev/messaging/formatting-message-text."""
    text = f"*{notification.title}*\n{notification.text}"
    return _as_json({"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")})


def _discord(notification: Notification) -> tuple[bytes, dict[str, str]]:
    text = f"**{notification.title}**\n{notification.text}"
    return _as_json({"content": text[:_DISCORD_LIMIT], "allowed_mentions": {"parse": []}})


_FORMATS: Final[Mapping[str, Callable[[Notification], tuple[bytes, dict[str, str]]]]] = {
    "json": lambda notification: _as_json(document(notification)),
    "ntfy": _ntfy,
    "slack": _slack,
    "discord": _discord,
}


def _call_apprise(address: str, notification: Notification) -> str:
    try:
        import apprise
    except ImportError:
        raise NotSentError("apprise is not installed here: pip install 'mlx-flightdeck[notify]'") from None
    # Its own log may have the address.
    logging.getLogger("apprise").disabled = True
    service = apprise.Apprise()
    if not service.add(_value(address)):
        raise NotSentError(f"apprise knows no service of the address in {address}")
    if not service.notify(title=notification.title, body=notification.text):
        raise NotSentError("apprise could not deliver it", again=True)
    return "apprise delivered it"
