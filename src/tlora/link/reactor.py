"""Any number of connections that one thread reads and writes: a peer that sends parts of lines, or does not read, delays no other.

The thread is the one that handles what is read: another would wait for the interpreter at each call of the system. Nothing here knows what
the lines say.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tlora.link.lines import Line

_MOST_UNSENT = 1024  # messages for a peer that does not read, before its connection ends: it dials again and is told the latest
_READS_AT_ONCE = 4  # of a connection, before others have their turn


class Channel:
    """A connection of a reactor. `close` ends it at once."""

    def __init__(self, line: Line, hear: Callable[[bytes], None], ended: Callable[[ValueError | None], bytes]) -> None:
        """`hear` gets each line, in order. `ended` is called once: with None if the peer ended the connection, or with the ValueError for a
        line that is too long, or that `hear` has raised; what it returns is sent before the end.
        """
        self.line, self._hear, self._ended = line, hear, ended
        self._unsent: deque[bytes] = deque()
        self._sent, self._is_last = 0, False  # bytes of the first that is unsent; whether the last is
        self.waits = False  # whether the system takes nothing for now

    def send(self, line: bytes, *, is_last: bool = False) -> None:
        """Send it as soon as the system takes it; after the last one the connection ends."""
        self._unsent.append(line)
        self._is_last |= is_last
        if len(self._unsent) > _MOST_UNSENT:
            self.line.end()
        elif not self.waits:
            self.write()

    def write(self) -> None:
        """Send what the system takes."""
        self.waits = False
        try:
            while self._unsent:
                with memoryview(self._unsent[0]) as content:
                    while self._sent < len(content):
                        self._sent += self.line.send_ready(content[self._sent :])
                self._unsent.popleft()
                self._sent = 0
        except BlockingIOError:
            self.waits = True
        except OSError:
            self.line.end()  # which the next read sees
        if self._is_last and not self.waits:
            self.line.end()

    def read(self) -> bool | None:
        """Take in what has come, up to a limit. Returns whether there is more; None at the end, of which `ended` has heard."""
        error: ValueError | None = None
        try:
            for _ in range(_READS_AT_ONCE):
                if (lines := self.line.read_ready()) is None:
                    break
                for line in lines:
                    self._hear(line)
            else:
                return True
        except BlockingIOError:
            return False
        except ValueError as fault:
            error = fault
        self.send(self._ended(error), is_last=True)
        return None


class Reactor:
    """For one thread, but for `wake`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._events: dict[Channel, int] = {}  # for which each is registered
        self._unread: set[Channel] = set()
        self._is_asleep = self._is_woken = False

    def add(self, channel: Channel) -> None:
        """Read it from now on; first what its line has read already."""
        channel.line.stop_blocking()
        self._events[channel] = selectors.EVENT_READ
        self._selector.register(channel.line, selectors.EVENT_READ, channel)
        self._unread.add(channel)

    def send(self, channel: Channel, line: bytes, *, is_last: bool = False) -> None:
        """As `Channel.send`, of one that was added. It may have ended."""
        if channel in self._events:
            channel.send(line, is_last=is_last)
            self._follow(channel)

    def turn(self, timeout_seconds: float) -> None:
        """Wait until something can be read or written, or `wake` is called; read and write what can be, once."""
        readable, self._unread = self._unread, set[Channel]()
        self._is_asleep = True  # from here on `wake` does more than be remembered
        ready = self._selector.select(0 if readable or self._is_woken else timeout_seconds)
        self._is_asleep = self._is_woken = False
        for key, events in ready:
            if key.data is None:
                self._wakened.recv(1024)
            elif events & selectors.EVENT_WRITE:
                key.data.write()
                self._follow(key.data)
            if key.data is not None and events & selectors.EVENT_READ:
                readable.add(key.data)
        for channel in readable:
            more = channel.read()
            if more is None:
                self._remove(channel)
            elif more:
                self._unread.add(channel)

    def wake(self) -> None:
        """Make `turn` return, now or when it is called next; from any thread."""
        self._is_woken = True
        if self._is_asleep:
            with suppress(OSError):  # there are enough bytes to wake it, or it is closed
                self._waker.send(b"\0")

    def close(self) -> None:
        """End all connections."""
        for channel in list(self._events):
            self._remove(channel)
        self._selector.close()
        self._waker.close()
        self._wakened.close()

    def _follow(self, channel: Channel) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.waits else 0)
        if wanted != self._events[channel]:
            self._events[channel] = wanted
            self._selector.modify(channel.line, wanted, channel)

    def _remove(self, channel: Channel) -> None:
        del self._events[channel]
        self._unread.discard(channel)
        self._selector.unregister(channel.line)
        channel.line.end()
        channel.line.close()
