"""Measures: the real training step on each node alone, and the links between them. What was measured is in
`engine.measurements`, stored by `engine.store`; what follows from it (shares, prediction) is `engine.plan`."""
