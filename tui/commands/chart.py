"""metrics --chart: a chart of a run as a file."""

from __future__ import annotations

import argparse

from engine.api import Engine, ExitCode, safe_repr
from engine.errors import InputError
from tui.chart_files import COLUMNS, write_chart
from tui.widgets.chart import View, read_picture
from tui.widgets.run_summary import marks


def metrics_chart(options: argparse.Namespace, engine: Engine) -> int:
    directory = engine.runs.find_trained(options.run)
    snapshot, series = engine.runs.watch(directory.id).poll(), engine.runs.series(directory.id)
    series.refresh(ended=snapshot.record.state.ended)
    if not series.metrics:
        raise InputError("there is nothing to draw", where=directory.id, why="it has reported no figures")
    metric = options.metric or series.metrics[0]
    if metric not in series.metrics:
        why = f"it has {', '.join(series.metrics)}"
        raise InputError(f"no metric {safe_repr(metric)}", where=directory.id, why=why)
    shown = View(axis=options.axis, smooth=options.average)
    drawn = read_picture(series, shown, metric, COLUMNS, marks(snapshot))
    write_chart([drawn], f"{snapshot.record.name} ({directory.id})", options.chart)
    print(f"wrote {options.chart}")
    return ExitCode.OK
