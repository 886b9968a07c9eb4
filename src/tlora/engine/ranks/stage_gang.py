"""The ranks of a worker that have its base in stages: none begins before all are there, and jobs come to the last stage alone. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tlora.engine.messages import Command, Listen, SetGpus, Stop


class StageGang:
    """`own` ranks of the worker's host, which come first, and others that are lent, `stages` in all; 0: the base is not cut. The lent ones
    have the first stages, so that the last one, where jobs are led and written, is here.
    """

    def __init__(self, stages: int, own: int) -> None:
        self._stages, self._own = stages, own
        self._held: list[Command] = []
        self.is_whole = False  # all have begun

    @property
    def is_cut(self) -> bool:
        return self._stages > 0

    @property
    def waits(self) -> bool:
        """Whether ranks are missing."""
        return self.is_cut and not self.is_whole

    @property
    def last(self) -> int:
        return self._own - 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """In the order of their stages; none where the base is not cut."""
        return (*range(self._own, self._stages), *range(self._own)) if self.is_cut else ()

    @property
    def is_apart(self) -> bool:
        """Whether other hosts lend some."""
        return self._stages > self._own

    def leading(self, taking: Sequence[int]) -> Sequence[int]:
        """Those of the ranks `taking` jobs that may lead one."""
        return [self.last] if self.is_cut else taking

    def complete(self, came: int, here: Collection[int]) -> Sequence[int]:
        """The ranks that begin now that rank `came` is `here`: all when the last of them has come."""
        if not self.is_cut:
            return [came]
        self.is_whole = set(self.ranks) <= set(here)
        return self.ranks if self.is_whole else []

    def holds(self, command: Command) -> bool:
        """Whether it is kept until all have begun."""
        held = self.waits and not isinstance(command, Listen | SetGpus | Stop)
        if held:
            self._held.append(command)
        return held

    def release(self) -> Sequence[Command]:
        """What was held, once all have begun."""
        released, self._held = ([], self._held) if self.waits else (self._held, [])
        return released
