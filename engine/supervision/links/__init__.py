"""The supervisor's links to the hosts of one attempt: what their ranks do, and the way to their keepers.

Everything else in engine.supervision speaks to hosts through these alone. Nothing here judges, decides or writes state.
"""
