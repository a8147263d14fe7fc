"""What a node is: its chip, memory, disk and versions, as it says itself. `probe` asks; `linux` and `macos` read what
those systems print, as pure functions; `facts_script` runs on the node. Nothing here judges: that is preflight's."""
