"""The channels of [notify], by the standard library: a desktop's notifications, a command, webhooks; and Apprise.

A channel has three tries when it is not reached or has a fault of its own, and one when it refuses, or takes a
notification and does not answer. Answers are shown without secrets, which addresses often are."""

from __future__ import annotations

import base64
import contextlib
import functools
import html
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from engine.config.formats import web_address_form
from engine.config.models import Config, WebhookConfig
from engine.node.processes import start_session
from engine.security.redact import Redactor
from engine.security.sanitise import last_line, plain
from engine.snapshots import ChannelAnswer, Notification

_PAUSES_S = (0.0, 1.0, 3.0)
"""Before each try."""
_HTTP_LIMIT_S = 10.0
_COMMAND_LIMIT_S = 30.0
_TOTAL_LIMIT_S = 45.0
"""For all channels together: a server may answer byte by byte, and a name may not be resolved for minutes."""
_DISPLAY = ("on run argv", "display notification (item 2 of argv) with title (item 1 of argv)", "end run")


class NotSentError(Exception):
    def __init__(self, why: str, *, again: bool = False) -> None:
        """`again`: another try may succeed."""
        super().__init__(why)
        self.again = again


def document(news: Notification) -> dict[str, Any]:
    """As a command and a webhook of format json get it."""
    fields = {name: getattr(news, name) for name in ("event", "title", "text", "run")}
    return {**fields, "at": news.at.isoformat()}


def queue_empty(home: Path, config: Config) -> list[ChannelAnswer]:
    """Tell that nothing waits in the queue of `home` any more, where [notify] of `config` wants it. Blocking."""
    if "queue_empty" not in config.notify.on:
        return []
    text = f"every queued run on {socket.gethostname()} has ended ({home})"
    return send_to_all(config, Notification("queue_empty", "the queue is empty", text))


def redactor_for(config: Config) -> Redactor:
    """Takes out the job's secrets, and addresses and tokens of notifications."""
    written = {url: url for webhook in config.notify.webhooks if not (url := webhook.url).startswith("env:")}
    values = {name: os.environ.get(name, "") for name in config.notify.variables}
    return Redactor({**config.job.env, **written, **values})


def send_to_all(config: Config, news: Notification) -> list[ChannelAnswer]:
    """Send by every channel at the same time. Blocking, for at most _TOTAL_LIMIT_S."""
    senders, redactor, answers = _channels(config), redactor_for(config), dict[str, ChannelAnswer]()

    def send(name: str) -> None:
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            sent = again = False
            try:
                text, sent = senders[name](news), True
            except NotSentError as fault:
                text, again = str(fault), fault.again
            except Exception as fault:  # One of a library's own, whose text may have the address.
                text = type(fault).__name__
            answers[name] = ChannelAnswer(name, sent, plain(redactor(text), 200))
            if not again:
                return

    threads = [threading.Thread(target=send, args=(name,), daemon=True) for name in senders]
    deadline = time.monotonic() + _TOTAL_LIMIT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no answer within {_TOTAL_LIMIT_S:.0f} s"
    return [answers.get(name) or ChannelAnswer(name, False, late) for name in senders]


def _channels(config: Config) -> dict[str, Callable[[Notification], str]]:
    """They return what came back, and raise NotSentError."""
    notify, folder = config.notify, config.file.parent if config.file is not None else Path.home()
    senders: dict[str, Callable[[Notification], str]] = {"desktop": _show_on_desktop} if notify.desktop else {}
    if notify.command:
        senders["command"] = lambda news: _run(notify.command, folder, news)
    for number, webhook in enumerate(notify.webhooks, 1):
        senders[f"webhook {number}"] = functools.partial(_post, webhook)
    for number, address in enumerate(notify.apprise, 1):
        senders[f"apprise {number}"] = functools.partial(_call_apprise, address)
    return senders


def _show_on_desktop(news: Notification) -> str:
    if program := shutil.which("osascript"):
        words = [program, *(word for line in _DISPLAY for word in ("-e", line))]
    elif program := shutil.which("notify-send"):
        words = [program, "--app-name=flightdeck", "--"]
    else:
        raise NotSentError("this machine has neither osascript (macOS) nor notify-send")
    return _run([*words, news.title, news.text], Path.home(), news)


def _run(words: Sequence[str], folder: Path, news: Notification) -> str:
    """Files in place of pipes: a child that it leaves behind keeps them, and nobody waits for that."""
    name, fields = Path(words[0]).name, document(news)
    variables = {f"FLIGHTDECK_{key.upper()}": text for key, text in fields.items()}
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
        source.write(json.dumps(fields).encode() + b"\n")
        source.seek(0)
        try:
            process = start_session(words, folder, output, stdin=source, env={**os.environ, **variables})
            code = process.wait(_COMMAND_LIMIT_S)
        except OSError as error:
            raise NotSentError(f"{name} cannot be started: {error.strerror}") from error
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


def _post(webhook: WebhookConfig, news: Notification) -> str:
    address = _value(webhook.url)
    if web_address_form(address) is not None:
        raise NotSentError(f"the value of {webhook.url} is no http:// or https:// address")
    host = urlsplit(address).hostname
    body, headers = _message(webhook.format, news)
    if webhook.token is not None:
        headers["Authorization"] = f"Bearer {_value(webhook.token)}"
    try:
        request = Request(address, body, {**headers, "User-Agent": "flightdeck"}, method="POST")
        with build_opener(_NoRedirect).open(request, timeout=_HTTP_LIMIT_S) as answer:
            return f"{host} answered {answer.status}"
    except HTTPError as error:
        text = "a redirect, which is not followed" if 300 <= error.code < 400 else ""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            text = text or last_line(error.read(500).decode(errors="replace"))
        again = error.code >= 500 or error.code == 429
        raise NotSentError(f"{host} answered {error.code}" + (f": {text}" if text else ""), again=again) from None
    except URLError as error:
        # urllib makes one of a fault before all was sent.
        why = getattr(error.reason, "strerror", 0) or error.reason
        raise NotSentError(f"{host} cannot be reached: {why}", again=True) from None
    except (OSError, http.client.HTTPException) as error:
        late = isinstance(error, TimeoutError)
        why = f"no answer within {_HTTP_LIMIT_S:.0f} s" if late else getattr(error, "strerror", 0) or error
        raise NotSentError(f"{host} took it perhaps: {why}") from None
    except ValueError:
        # Whose text has the value.
        raise NotSentError("its url or token has characters that HTTP does not allow") from None


def _message(form: str, news: Notification) -> tuple[bytes, dict[str, str]]:
    """As docs.ntfy.sh/publish, docs.slack.dev and discord.com/developers have it."""
    title, text = news.title, news.text
    if form == "ntfy":
        if not title.isascii():
            title = f"=?UTF-8?B?{base64.b64encode(title.encode()).decode()}?="
        priority = "4" if news.event == "failure" else "3"
        return text.encode(), {"Title": title, "Priority": priority, "Content-Type": "text/plain"}
    bodies: dict[str, dict[str, Any]] = {
        "slack": {"text": html.escape(f"*{title}*\n{text}", quote=False)},
        "discord": {"content": f"**{title}**\n{text}"[:2_000], "allowed_mentions": {"parse": []}},
    }
    return json.dumps(bodies.get(form) or document(news)).encode(), {"Content-Type": "application/json"}


def _value(text: str) -> str:
    """Raises NotSentError where the variable is not set."""
    name = text.removeprefix("env:")
    value = os.environ.get(name, "").strip() if name != text else text
    if not value:
        raise NotSentError(f"the variable {name} is not set in the environment that launched")
    return value


def _call_apprise(address: str, news: Notification) -> str:
    try:
        import apprise
    except ImportError:
        raise NotSentError("apprise is not installed here: pip install 'mlx-flightdeck[notify]'") from None
    # Its own log may have the address.
    logging.getLogger("apprise").disabled = True
    service = apprise.Apprise()
    if not service.add(_value(address)):
        raise NotSentError(f"apprise knows no service of the address in {address}")
    if not service.notify(title=news.title, body=news.text):
        raise NotSentError("apprise could not deliver it", again=True)
    return "apprise delivered it"
