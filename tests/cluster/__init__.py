"""The test cluster: N nodes on one Linux box, each with its own namespaces, root, sshd, user, home and python.

pytest's fixture is `cluster` (tests.cluster.fixtures); by hand: `uv run python -m tests.cluster up 4`.
Nothing of the engine's logic lives here, and nothing here is shipped."""
