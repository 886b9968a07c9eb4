"""The roof: parse the command line, call one function, print what it returns. Decides nothing about training."""


def main() -> None:
    """The program `tlora`. Loads the commands, and they load what they call: `tlora --help` touches no model library."""
    from tlora.cli.commands import app

    app()
