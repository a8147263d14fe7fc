"""The console and the command line: two faces on `engine.session`, with no logic of their own.
`app`, `bridge`, `screens` and `widgets` are the console; `cli` is the commands. No engine internals in here."""
