"""The headless engine: plans, checks, launches, watches, aborts. No textual and no rich in here;
`engine.session` is the faces' only door; `engine.worker` stands apart and runs on the nodes."""
