"""The series of a run over time, on disk: min/max pyramids, what builds them, and what reads them for a chart."""
