"""The metrics that would be read from a log."""

from engine.run.metrics_trial import MetricsTrial


def test_a_last_line_without_an_end_is_not_called_unread() -> None:
    trial = MetricsTrial([b"step 10 loss 2.5\n", b"step 20 loss 2.4"], None)
    assert ([each["iteration"] for each in trial.reports], trial.unread) == ([10, 20], [])
