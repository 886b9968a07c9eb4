"""The command line: parses arguments, calls one function, prints what it returns. Decides nothing about training."""

import os

_SPINS = "3000"  # about 10 us; the reason is in docs/adr/017-cpu-threads-follow-the-work-of-a-product.md


def main() -> None:
    """The program `tlora`. Each command imports what it needs when it is called, so that `tlora --help` imports no model library."""
    try:
        _set_environment()
        from tlora.cli.commands import app

        app()
    except KeyboardInterrupt:  # while this program's own modules are imported
        os._exit(130)
    except SystemExit as end:
        if end.code == 130:  # by Ctrl-C: threads may still be writing files, and the next run removes what they leave
            from tlora.link.log import leave

            leave(130)
        raise


def _set_environment() -> None:
    """What the libraries of all commands, and the processes that they start, read of the environment."""
    from tlora.cache_directory import share_compiled_kernels
    from tlora.cluster.gpus import count_as_the_driver_does
    from tlora.sharing.multicast import turn_multicast_off

    turn_multicast_off()
    count_as_the_driver_does()
    share_compiled_kernels()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read by torch's threads when torch is imported
