"""What must hold before anything is launched: the registry, one module per check, and the runner over them.

No check starts training or writes into a run; a check that cannot run says so and is never a silent pass.
"""
