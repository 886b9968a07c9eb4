"""`python -m tlora.cli.tethered_worker`: `tlora worker`, with a line to the process that has started it. The line's end is its SIGTERM.

So a worker never outlives an engine's agent, however that ends: it saves its jobs, hands them back and exits with status 143.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from tlora.cli import main
from tlora.link.lines import Line
from tlora.link.supervisor import line_to_parent


def end_with(line: Line) -> None:
    with contextlib.suppress(ValueError, OSError):
        for _ in line.lines():
            pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(line_to_parent(),), name="tether", daemon=True).start()
    sys.argv[1:1] = ["worker"]
    main()
