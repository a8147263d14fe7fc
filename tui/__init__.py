"""The frontends: the command line and the console, both on `engine.api` alone."""
