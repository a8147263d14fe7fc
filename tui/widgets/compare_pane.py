"""The runs that are compared: their curves over one another, in colours that stay a run's, why their speeds differ, and
a table of what differs, with the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget

from engine import api
from engine.errors import plural
from tui.formatting import comparison_rows, short_name, shortened
from tui.glyphs import MUTED, RANK_STYLES, STATES
from tui.state import DeckState
from tui.widgets.chart import Chart
from tui.widgets.pane import Pane
from tui.widgets.text import GAP, Column, Text, lay_out

if TYPE_CHECKING:
    from engine.api import Comparison, RunSeries, SeriesChart

_VALIDATION: Final = "validation loss"
"""A metric of its own: with several runs each has one curve."""
_MOST_COLUMNS: Final = 2000
"""All curves of a chart together have no more: of twenty each has the points of a hundred columns."""
_KEY: Final = range(17, 41)
_CELL: Final = range(9, 29)
"""Characters of a key and of a value in the table at most: as many as all runs have room for."""


class JointSeries:
    """The series of several runs as one source of a chart: of each metric one curve a run."""

    def __init__(self, names: Sequence[str], sources: Sequence[RunSeries], places: Sequence[int]) -> None:
        self._runs = list(zip(names, sources, places, strict=True))

    def refresh(self, *, ended: bool = False) -> None:
        for _, source, _ in self._runs:
            source.refresh(ended=ended)

    @property
    def metrics(self) -> list[str]:
        metrics = dict.fromkeys(metric for _, source, _ in self._runs for metric in source.metrics)
        ordered = [metric for metric in ("loss", *api.UNITS, *metrics) if metric in metrics]
        if "loss" in metrics:
            ordered.insert(1, _VALIDATION)
        return list(dict.fromkeys(ordered))

    def axis_of(self, metric: str, axis: str) -> str:
        """One that all have: iterations and tokens are nothing to lay over one another."""
        name, axes = _metric(metric), (axis, "iterations", "time")

        def has(source: RunSeries, axis: str) -> bool:
            return source.axis_of(name, axis) == axis or name not in source.metrics

        return next((axis for axis in axes if all(has(source, axis) for _, source, _ in self._runs)), axes[1])

    def extent(self, metric: str, axis: str) -> tuple[float, float]:
        axis = self.axis_of(metric, axis)
        extents = [source.extent(_metric(metric), axis) for _, source, _ in self._runs]
        extents = [extent for extent in extents if extent != (0.0, 0.0)] or [(0.0, 0.0)]
        return min(first for first, _ in extents), max(last for _, last in extents)

    def chart(
        self, metric: str, axis: str, window: tuple[float, float] | None, width: int, *, smooth: bool = False
    ) -> SeriesChart:
        axis = self.axis_of(metric, axis)
        window, width = window or self.extent(metric, axis), min(width, _MOST_COLUMNS // len(self._runs))
        charts = [source.chart(_metric(metric), axis, window, width, smooth=smooth) for _, source, _ in self._runs]
        curves = []
        for (name, _, place), chart in zip(self._runs, charts, strict=True):
            # The first is that which matters most; of losses, that of the training.
            curve = next((c for c in chart.curves if (c.label == "validation") == (metric == _VALIDATION)), None)
            points, average = (curve.points, curve.average) if curve is not None else ([], [])
            curves.append(api.SeriesCurve(name, points, average, place))
        return api.SeriesChart(metric, charts[0].unit, axis, tuple(curves))

    def places(self, axis: str, iterations: Sequence[float]) -> list[float]:
        return []

    def values(self, axis: str, x: float, metric: str | None = None) -> Iterator[tuple[tuple[str, str], float]]:
        for name, source, _ in self._runs:
            seen = set[str]()
            for (named, label), y in source.values(axis, x, metric and _metric(metric)):
                joint = _VALIDATION if (named, label) == ("loss", "validation") else named
                if joint not in seen:
                    seen.add(joint)
                    yield (joint, name), y


def _metric(metric: str) -> str:
    return "loss" if metric == _VALIDATION else metric


class ComparePane(Pane):
    NAME = "compare"
    HINTS = ("next_metric", "chart_axis", "chart_average", "pin_run", "back")

    def __init__(self) -> None:
        super().__init__()
        self._comparison: Comparison | None = None
        self._sources: Mapping[str, RunSeries] = {}
        self._places: dict[str, int] = {}
        """Run → the place of its colour, which stays for as long as the console is open."""
        self._pinned = 0

    def compose(self) -> ComposeResult:
        yield Chart(id="compare-chart")
        with VerticalScroll(classes="detail", can_focus=True, id="compare-detail"):
            yield Text(id="compare-text", wraps=True)

    @property
    def chart(self) -> Chart:
        return self.query_one(Chart)

    @property
    def keys_go_to(self) -> Widget:
        return self.query_one("#compare-detail")

    @property
    def opens(self) -> bool:
        return False

    def title(self, state: DeckState) -> str:
        count = len(self._comparison.runs) if self._comparison is not None else 0
        return f"compare{state.glyphs.separator}{plural(count, 'run')}"

    def open(self, comparison: Comparison, sources: Mapping[str, RunSeries]) -> None:
        """`sources`: by the runs' ids."""
        self._comparison, self._sources, self._pinned = comparison, sources, 0
        for run in comparison.runs:
            free = (place for place in range(len(self._places) + 1) if place not in self._places.values())
            self._places.setdefault(run.id, next(free))
        self._open_chart()
        self.refresh_pane()

    def pin(self) -> None:
        """Draw the next run over the others."""
        if self._comparison is not None:
            self._pinned = (self._pinned + 1) % len(self._comparison.runs)
            self._open_chart()
            self.refresh_pane()

    def _open_chart(self) -> None:
        assert self._comparison is not None
        names, ids = list(self._comparison.names), [run.id for run in self._comparison.runs]
        # The first curve comes on top.
        order = [*range(self._pinned, len(ids)), *range(self._pinned)]
        places = [self._places[run] for run in ids]
        sources = [self._sources[run] for run in ids]
        self.chart.open(JointSeries(*([part[i] for i in order] for part in (names, sources, places))))

    def move(self, name: str) -> bool:
        if (direction := {"left": -1, "right": 1}.get(name)) is not None:
            self.chart.move_cursor(direction)
            return True
        self.scroll_text(self.query_one("#compare-detail"), name)
        return True

    def draw(self, state: DeckState) -> None:
        if self._comparison is None:
            return
        self.chart.show(self._comparison, (), state.glyphs)
        self.query_one("#compare-text", Text).put(Content("\n").join(self._lines(state, self.room - 2)))

    def _lines(self, state: DeckState, width: int) -> list[Content]:
        assert self._comparison is not None
        comparison, lines = self._comparison, list[Content]()
        for number, (run, name) in enumerate(zip(comparison.runs, comparison.names, strict=True)):
            style = RANK_STYLES[self._places[run.id] % len(RANK_STYLES)]
            pinned = ("  on top", MUTED) if number == self._pinned else ""
            lines.append(
                Content.assemble(
                    (f"{name}  ", f"bold {style}"),
                    state.glyphs.state(STATES[run.state], run.state),
                    (f"  {run.id}", MUTED),
                    pinned,
                )
            )
        for speed in comparison.speeds:
            lines += [Content(""), Content(speed.summary + ":" * bool(speed.reasons))]
            lines += [Content(f"  {reason}") for reason in speed.reasons]
        return [*lines, Content(""), *table_lines(comparison, width)]

    def text(self) -> str:
        if self._comparison is None:
            return ""
        width = 120 + len(self._comparison.runs) * (_CELL[-1] + GAP)
        return "\n".join(line.plain.rstrip() for line in self._lines(self.state, width))


def table_lines(comparison: Comparison, width: int) -> list[Content]:
    """Each key that differs, with the runs' values and the name of the best; lines of at most `width` cells."""
    if not comparison.differences:
        same = "settings, data, hardware and results are the same: esc goes back to mark other runs"
        return [Content.styled(same, MUTED)]
    count = len(comparison.runs)
    beside = max(len(difference.section) for difference in comparison.differences) + GAP
    key = max(len(difference.key) for difference in comparison.differences)
    key = max(_KEY[0], min(_KEY[-1], key, width - beside - (count + 1) * (_CELL[0] + GAP)))
    room = width - beside - key
    cell = max(_CELL[0], min(_CELL[-1], room // (count + 1) - GAP))
    shown = max(1, min(count, room // (cell + GAP) - 1))
    titles = ("", "only what differs", *(short_name(name, cell) for name in comparison.names[:shown]), "best")
    rows = [
        (section, shortened(name, key), *cells[:shown], short_name(cells[-1], cell))
        for section, name, *cells in comparison_rows(comparison, cell)
    ]
    columns = [Column(title, [row[place] for row in rows], 9) for place, title in enumerate(titles)]
    head, drawn = lay_out(columns, width)
    hidden = f"{plural(count - shown, 'run')} not shown: there is no room" if shown < count else ""
    return [head, *drawn, *([Content.styled(hidden, MUTED)] if hidden else [])]
