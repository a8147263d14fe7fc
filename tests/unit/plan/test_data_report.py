"""The optional report on the data's quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError
from engine.plan.data_report import DataReport, read_data_report

WHOLE: dict[str, Any] = {
    "ifd_score": {"overall_score": 0.82, "quality_tier": "high", "total_examples": 51_200},
    "dpo_metrics": {"pairs": 12},
    "rlvr_verifiability": 0.4,
    "poisoning_detected": False,
    "overall_ready": True,
    "recommendations": ["drop duplicates"],
}


def written(folder: Path, document: object) -> Path:
    file = folder / "report.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def test_a_good_report_neither_warns_nor_blocks(tmp_path: Path) -> None:
    report = read_data_report(written(tmp_path, WHOLE))
    assert (report.blocks, report.warns, report.ifd_score.total_examples) == (None, None, 51_200)


def test_data_that_is_not_ready_warns_with_what_to_do(tmp_path: Path) -> None:
    report = read_data_report(written(tmp_path, WHOLE | {"overall_ready": False}))
    assert report.blocks is None and report.warns == "the data report says overall_ready: false: drop duplicates"


def test_poisoned_data_blocks(tmp_path: Path) -> None:
    assert read_data_report(written(tmp_path, WHOLE | {"poisoning_detected": True})).blocks is not None


def test_what_a_report_leaves_out_is_not_known() -> None:
    report = DataReport.model_validate({})
    assert (report.overall_ready, report.warns, report.blocks) == (None, None, None)


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"ifd_score": {"total_examples": 0}}',
        '{"ifd_score": {"total_examples": -100}}',
        '{"ifd_score": {"overall_score": NaN}}',
        '{"poisoning_detected": "perhaps"}',
        "[" * 20_000,
    ],
)
def test_what_is_no_report_is_one_clear_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError) as refused:
        read_data_report(written(tmp_path, content))
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_report_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_data_report(tmp_path / "none.json")


def test_a_reports_words_cannot_steer_a_terminal() -> None:
    report = DataReport.model_validate({"recommendations": ["\x1b[2J clear"]})
    assert "\x1b" not in report.recommendations[0]
