"""The data quality report that a job may name, read on this machine."""

from __future__ import annotations

from pathlib import Path

from engine.config.models import FlightConfig
from engine.config.places import resolved
from engine.errors import InputError
from engine.planning.data_report import DataReport, read_data_report
from engine.security.paths import default_roots, validate_path


def data_report(config: FlightConfig) -> tuple[DataReport | None, str | None]:
    """The report, or why it could not be read; neither where the job names none. Blocking."""
    named = config.job.data_quality_report
    if named is None:
        return None, None
    base = config.file.parent if config.file is not None else Path("/")
    try:
        roots = (*default_roots(), base, *(Path(root) for root in config.preflight.roots))
        return read_data_report(validate_path(resolved(named, base), "data_quality_report", roots=roots)), None
    except InputError as error:
        return None, str(error)
