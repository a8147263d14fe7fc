"""How the head runs programs on a node: on this machine (`local`) or over SSH (`ssh`); `fleet` has one of each node."""
