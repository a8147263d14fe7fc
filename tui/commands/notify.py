"""notify: whether the channels of [notify] work."""

from __future__ import annotations

import argparse
import sys

from engine.api import Engine, ExitCode
from tui.commands.terminal import Lines, accepted_config, is_person, print_json
from tui.formatting import terminal_notification


def notify(options: argparse.Namespace, engine: Engine) -> int:
    config = accepted_config(options, engine, launch=True)
    answers = engine.checks.notifications(config)
    if config.notify.terminal and is_person(sys.stderr):
        sys.stderr.write(terminal_notification("a test of flightdeck"))
    if options.json:
        print_json({"channels": answers, "terminal": config.notify.terminal})
    else:
        lines = Lines()
        for answer in answers:
            lines.say(f"{lines.word('pass' if answer.sent else 'fail', 5)}{answer.channel}: {answer.answer}")
        if config.notify.terminal:
            lines.say("     terminal: the console rings and sends OSC 9 while it is open")
    return ExitCode.OK if all(answer.sent for answer in answers) else ExitCode.FAILED
