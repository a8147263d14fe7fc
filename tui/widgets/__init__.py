"""What the screens are made of: panes, lists, plots, the header and the key bar.
A widget shows a DeckState (or a file) and asks for nothing; text from outside goes in as plain Content."""
