"""The few exceptions that reach a user. Each message gives the value, the rule and the remedy.

Not here: what only a bug can break. That is an `assert` with the value in its message.
"""


class TloraError(Exception):
    """Anything a user can cause and mend."""


class ConfigError(TloraError, ValueError):
    """A jobs file, an option or a spec breaks a rule."""


class DataError(TloraError, ValueError):
    """A data file or one of its rows cannot be trained on. `disk_full`: only for now, as there is no room for what is made of it."""

    def __init__(self, message: str, *, disk_full: bool = False) -> None:
        super().__init__(message)
        self.disk_full = disk_full


class ModelError(TloraError, ValueError):
    """A base model, tokenizer or adapter is missing or does not fit."""


class CheckpointError(TloraError, OSError):
    """A checkpoint is damaged, or cannot be written."""


class CapacityError(TloraError, MemoryError):
    """A job cannot fit into the memory that there is."""


class RankError(TloraError, ConnectionError):
    """Another rank is lost, failed or differs from this one, or ranks cannot reach each other."""


class ServiceError(TloraError, ConnectionError):
    """A server cannot be reached, or has refused a request. `status` is 0 where there was no answer; `code` is the answer's own."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def shown(value: object) -> str:
    """A value as messages quote it: its repr, cut."""
    return cut(repr(value))


def cut(text: str) -> str:
    """Cut a text to the 80 characters that a message has room for."""
    return text if len(text) <= 80 else text[:77] + "..."


def first_line(error: BaseException) -> str:
    """Of a library's message, or the name of its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
