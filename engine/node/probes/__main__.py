"""`python -m engine.node.probes NAME ARGUMENT…` runs one probe."""

import os
import sys

from engine.node import probes

if __name__ == "__main__":
    probes.run(sys.argv[1], sys.argv[2:])
    # What a probe has imported may have threads that would be waited for.
    sys.stderr.flush()
    os._exit(0)
