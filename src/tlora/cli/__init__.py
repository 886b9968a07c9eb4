"""The roof: parse the command line, call one function, print what it returns. Decides nothing about training."""

import os
import sys
from contextlib import suppress

_SPINS = "3000"  # about 10 us; why so many stands in docs/design.md, "Threads by the work of a product"


def main() -> None:
    """The program `tlora`. Loads the commands, and they load what they call: `tlora --help` touches no model library."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # torch's threads read it when torch is loaded
    try:
        from tlora.cli.commands import app

        app()
    except KeyboardInterrupt:  # while the commands are loaded
        _quit(130)
    except SystemExit as end:
        if end.code == 130:  # by Ctrl-C
            _quit(130)
        raise


def _quit(status: int) -> None:
    """At once. An interpreter's own exit waits for threads that still write; what they leave behind, the next run removes."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
