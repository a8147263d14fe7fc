"""What the console looks like: one scene a view and state, drawn at fixed sizes from a session that stands still.
`make_screenshots` writes the README's pictures from the same scenes."""
