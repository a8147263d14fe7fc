"""The tiny model, corpus and local cluster of `flightdeck demo`."""
