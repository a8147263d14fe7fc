"""The kinds of a job, its framework and its strategy: what a run of each may lose, reports, needs and starts with."""
