"""How a node is reached: run a command there, read a file from an offset, put a file whole. `base` says what every way
must do; `local` is this machine. Nothing here knows what is run or read, and asyncssh is imported in `ssh` alone."""
