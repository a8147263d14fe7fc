"""The console under a pilot: real app, real keys, an engine of constructed situations with a clock that stands still."""
