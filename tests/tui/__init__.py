"""The console under a pilot: real app, real keys, an engine of constructed situations, a clock that stands still."""
