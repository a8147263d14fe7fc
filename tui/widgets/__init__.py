"""The panes of the console, and what they draw with."""
