"""Notices the death of a rank, so that the other ranks do not wait for it forever.

A message between ranks waits inside MLX until every rank sends its part. So every two ranks hold one TCP
connection of their own, beside those of the backend, which is silent while both live. The operating system closes it
when the process ends, and TCP's keepalive notices within 20 s if a whole machine or its network is gone. The system
answers keepalive for a process that is busy or stopped, so a slow rank is never taken for a dead one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

from ...errors import UserError
from ...machine import environment
from ..distributed import World

# Seconds to connect, and seconds to wait for news of other ranks that died at the same moment.
_CONNECT = 10.0
_GRACE = 0.3
# A greeting is the listener's secret number and the caller's rank. Other messages are a kind and a rank.
_GREETING = struct.Struct("!QI")
_MESSAGE = struct.Struct("!cI")
_GOODBYE = b"g"
_ENDED = b"e"


class Peers:
    """Inside its `with` block, this rank watches the others; `ended` is called once, in a thread, with those that died.

    A rank that leaves the block without an exception says goodbye, so that the others expect its end. After an
    exception it says goodbye only if in_order() was called; otherwise the others treat it as dead.
    """

    def __init__(self, world: World, ended: Callable[[list[int]], None]):
        self._world = world
        self._ended = ended
        self._links: dict[int, socket.socket] = {}
        self._gone: set[int] = set()
        self._dead: set[int] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._orderly = False

    def __enter__(self) -> Peers:
        if self._world.size == 1:
            return self
        self._listener = socket.create_server(("", 0), backlog=self._world.size)
        self._secret = secrets.randbits(62)
        self._waking, self._waker = socket.socketpair()
        everyone = self._exchange()
        self._thread = threading.Thread(target=self._watch, name="deltatune ranks", daemon=True)
        self._thread.start()
        for rank in range(self._world.rank):
            self._call(rank, everyone[rank])
        with self._changed:
            self._changed.wait_for(lambda: len(self._links) + len(self._gone) == self._world.size - 1, _CONNECT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._world.size == 1:
            return
        if isinstance(error, UserError) and error.everywhere is None:
            # The other ranks take this one for dead at once, so it may not wait for their messages.
            error.everywhere = self._orderly
        if kind is None or self._orderly:
            self._tell(_GOODBYE, [self._world.rank])
        with self._changed:
            self._closing = True
        self._waker.send(b"x")
        self._thread.join()
        for link in (self._listener, self._waking, self._waker, *self._links.values()):
            link.close()

    @property
    def missing(self) -> list[int]:
        """The ranks to which no connection could be made."""
        with self._changed:
            return sorted(set(range(self._world.size)) - {self._world.rank} - set(self._links) - self._gone)

    @property
    def dead(self) -> list[int]:
        """The ranks that died."""
        with self._changed:
            return sorted(self._dead)

    def in_order(self) -> None:
        """Declare that every rank is about to end with the same error, and none is dead."""
        self._orderly = True

    def wait_for_end(self, seconds: float) -> None:
        """Wait after an error of the backend; return only if no rank is known to have died within `seconds`."""
        with self._changed:
            if self._changed.wait_for(lambda: bool(self._dead), seconds):
                # The watching thread will end the process.
                self._changed.wait_for(lambda: False, 60)

    def _exchange(self) -> list[tuple[int, int, list[str]]]:
        """Return every rank's secret number, port, and the addresses at which it may be reached."""
        host = socket.gethostname()
        introduction = json.dumps([self._secret, self._listener.getsockname()[1], host, _addresses()])
        listeners = []
        for text in self._world.gather_texts(introduction):
            secret, port, name, addresses = json.loads(text)
            listeners.append((secret, port, ["127.0.0.1", *addresses] if name == host else addresses))
        return listeners

    def _call(self, rank: int, listener: tuple[int, int, list[str]]) -> None:
        """Connect to a lower rank; its answer shows that no other program listens there."""
        secret, port, addresses = listener
        for address in addresses:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                link = stack.enter_context(socket.create_connection((address, port), timeout=_CONNECT / 2))
                link.sendall(_GREETING.pack(secret, self._world.rank))
                if _exactly(link, _MESSAGE.size) == _MESSAGE.pack(_GOODBYE, rank):
                    stack.pop_all()
                    self._add(rank, link)
                    return

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.settimeout(_CONNECT / 2)
        with contextlib.suppress(OSError):
            greeting = _exactly(link, _GREETING.size)
            if len(greeting) == _GREETING.size:
                secret, rank = _GREETING.unpack(greeting)
                if secret == self._secret:
                    link.sendall(_MESSAGE.pack(_GOODBYE, self._world.rank))
                    self._add(rank, link)
                    return
        link.close()

    def _add(self, rank: int, link: socket.socket) -> None:
        _keep_alive(link)
        link.settimeout(None)
        with self._changed:
            self._links[rank] = link
            self._changed.notify_all()
        self._waker.send(b"x")

    def _watch(self) -> None:
        """Watch the connections until this rank leaves or another one dies; runs in a separate thread."""
        until: float | None = None
        while True:
            with self._changed:
                if self._closing and not self._dead:
                    return
                links = {rank: link for rank, link in self._links.items() if rank not in self._gone}
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            with selectors.DefaultSelector() as selector:
                for source in (self._listener, self._waking, *links.values()):
                    selector.register(source, selectors.EVENT_READ)
                ready = {key.fileobj for key, _ in selector.select(left)}
            if self._waking in ready:
                self._waking.recv(64)
            if self._listener in ready:
                self._accept()
            for rank in [rank for rank, link in links.items() if link in ready]:
                self._hear(rank, links[rank])
            if self._dead and until is None:
                until = time.monotonic() + _GRACE
        dead = self.dead
        self._tell(_ENDED, dead)
        self._ended(dead)

    def _hear(self, rank: int, link: socket.socket) -> None:
        """Read a rank's message: its goodbye, or the death of another rank. A closed connection means that it died."""
        try:
            message = _exactly(link, _MESSAGE.size)
        except OSError:
            message = b""
        with self._changed:
            self._gone.add(rank)
            if len(message) < _MESSAGE.size:
                self._dead.add(rank)
            elif (told := _MESSAGE.unpack(message))[0] == _ENDED:
                self._dead.add(told[1])
            self._changed.notify_all()

    def _tell(self, kind: bytes, ranks: Iterable[int]) -> None:
        with self._changed:
            links = [link for rank, link in self._links.items() if rank not in self._dead]
        for link in links:
            for rank in ranks:
                with contextlib.suppress(OSError):
                    link.sendall(_MESSAGE.pack(kind, rank))


def _exactly(link: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or fewer if the other side closes the connection."""
    received = b""
    while len(received) < size and (more := link.recv(size - len(received))):
        received += more
    return received


def _keep_alive(link: socket.socket) -> None:
    """Make the system probe the other side every 5 s, and close the connection after 20 s without an answer."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for the first option.
    for names, value in ((("TCP_KEEPIDLE", "TCP_KEEPALIVE"), 5), (("TCP_KEEPINTVL",), 5), (("TCP_KEEPCNT",), 3)):
        for name in names:
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
                break


def _addresses() -> list[str]:
    """Return the IPv4 addresses at which other machines may reach this one; those that the launcher uses come first."""
    addresses = environment.launched_addresses()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket only chooses the network interface; nothing is sent.
        probe.connect((environment.launched_host() or "10.255.255.255", 9))
        addresses.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys(address for address in addresses if not address.startswith("127.")))
