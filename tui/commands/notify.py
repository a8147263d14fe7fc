"""notify: whether the channels of [notify] work."""

from __future__ import annotations

import argparse
import sys

from engine.api import Engine, ExitCode
from tui.commands.terminal import Lines, accepted_config, is_person, print_json
from tui.formatting import terminal_notification


def notify(options: argparse.Namespace, engine: Engine) -> int:
    config = accepted_config(options, engine, launch=True)
    answers, lines = engine.checks.notifications(config), Lines()
    if config.notify.terminal and is_person(sys.stderr):
        sys.stderr.write(terminal_notification("a test of flightdeck"))
    if options.json:
        print_json({"channels": answers})
    for answer in () if options.json else answers:
        lines.say(f"{lines.word('pass' if answer.sent else 'fail', 5)}{answer.channel}: {answer.answer}")
    return ExitCode.OK if all(answer.sent for answer in answers) else ExitCode.FAILED
