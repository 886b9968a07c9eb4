"""The command line: parses arguments, calls one function, prints what it returns. Decides nothing about training."""

import os
import signal

_SPINS = "3000"  # about 10 us; the reason is in docs/adr/017-cpu-threads-follow-the-work-of-a-product.md


def main() -> None:
    """The program `tlora`. Each command imports what it needs when it is called, so that `tlora --help` imports no model library."""
    if os.getpid() == 1:
        _die_of_signals()
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


def _die_of_signals() -> None:
    """Have the first process of a container die of signals until a command handles them: the kernel drops those of default action there."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not what nohup ignores
            signal.signal(number, _die)


def _die(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # a forked child has this handler too, and dies of the signal itself
    os._exit(128 + number)


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
