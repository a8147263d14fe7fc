"""The optional JSON report on data quality, which can block training on the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from engine.errors import InputError
from engine.models import FrozenModel
from engine.protocol.attempt import open_regular
from engine.security.sanitise import json_object, json_or_none, plain

_LIMIT_BYTES = 4 << 20
PlainText = Annotated[str, AfterValidator(lambda text: plain(text, 300))]


class IfdScore(FrozenModel):
    """Instruction-following difficulty (IFD) of the examples."""

    model_config = ConfigDict(allow_inf_nan=False)

    overall_score: float | None = None
    quality_tier: PlainText | None = None
    total_examples: int | None = Field(default=None, gt=0)


class DataFindings(FrozenModel):
    model_config = ConfigDict(allow_inf_nan=False)

    dpo_metrics: dict[str, Any] | None = None
    rlvr_verifiability: dict[str, Any] | float | None = None
    poisoning_detected: bool = False
    overall_ready: bool | None = None
    recommendations: Annotated[tuple[PlainText, ...], Field(max_length=100)] = ()


class DataReport(DataFindings):
    ifd_score: IfdScore = IfdScore()

    @property
    def blocks(self) -> str | None:
        """Why training on this data is refused."""
        return "the data report says poisoning_detected: true" if self.poisoning_detected else None

    @property
    def warns(self) -> str | None:
        """Why training on this data is not recommended."""
        if self.overall_ready is not False:
            return None
        details = f": {'; '.join(self.recommendations[:3])}" if self.recommendations else ""
        return f"the data report says overall_ready: false{details}"


def read_data_report(path: Path) -> DataReport:
    """Raises InputError when the file cannot be read or is not a report."""
    try:
        with open_regular(path) as file:
            content = file.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise InputError("the data report cannot be read", where=str(path), why=error) from error
    if len(content) > _LIMIT_BYTES:
        raise InputError("the data report is too large", where=str(path), why=f"more than {_LIMIT_BYTES >> 20} MiB")
    try:
        return DataReport.model_validate_json(content)
    except (ValidationError, RecursionError) as error:
        if json_object(json_or_none(content)).get("poisoning_detected") is True:
            # Must not be missed, whatever else is wrong with the report.
            return DataReport(poisoning_detected=True)
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}" if first else "nested too deeply"
        todo = "write JSON with ifd_score, poisoning_detected, overall_ready, recommendations"
        raise InputError("the data report is invalid", where=str(path), why=plain(why, 200), todo=todo) from error
