"""How the work of an update is divided over ranks: one module per strategy, each a `base.Strategy`."""
