"""Whole screens: the deck with its panes and views, and the dialogs above it.
A screen arranges widgets and turns keys into requests; it draws nothing itself."""
