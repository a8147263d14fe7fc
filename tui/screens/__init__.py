"""The one screen with all the panes, and the dialogs over it."""
