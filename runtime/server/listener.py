"""The socket at which a server accepts connections."""

from __future__ import annotations

import ipaddress
import os
import socket

from plait.runtime.errors import InputError
from plait.runtime.server.settings import BACKLOG

SEND_BUFFER_BYTES = 1 << 17  # Linux reserves twice as much


def bind_listener(host: str, port: int, write_timeout_s: float) -> socket.socket:
    """Returns a socket that listens at the address. Raises InputError, with the reason, if that is not possible."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _limit_unread_bytes(listener, write_timeout_s)
            listener.bind(address)
            listener.listen(BACKLOG)  # at once: with SO_REUSEADDR two servers could both bind until one of them listens
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        errno = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(errno) if errno is not None and errno > 0 else str(error)
        raise InputError(f"cannot listen at {host} port {port}: {reason}") from None
    listener.setblocking(False)
    return listener


def _limit_unread_bytes(listener: socket.socket, timeout_s: float) -> None:
    """Limits what the kernel keeps of a response that its client does not read, and for how long.

    Accepted connections inherit both options. Without them the kernel keeps up to 4 MiB as long as the client lives.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


def url_of(host: str, listener: socket.socket) -> str:
    """Returns the URL of a server that was bound to `host`.

    >>> url_of("::1", bind_listener("::1", 0, 15.0))                         # doctest: +SKIP
    'http://[::1]:41873'
    """
    return f"http://[{host}]:{port_of(listener)}" if ":" in host else f"http://{host}:{port_of(listener)}"


def port_of(listener: socket.socket) -> int:
    """Returns the port at which a socket listens."""
    return int(listener.getsockname()[1])


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback
