"""`uv run python -m tests.simulation --histories N --seed S`: simulates histories, and shrinks the first that fails."""

from tests.simulation.command import main

main()
