"""Where the runtime of a replica is: what a replica tells an ingress through Ray."""

from __future__ import annotations

import msgspec


class ReplicaAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """directory: of the runtime's Unix sockets, for an ingress on the same machine. host, port, secret: of a
    `TunnelServer`, for one on another machine; no host if there is none."""

    directory: str
    host: str = ""
    port: int = 0
    secret: bytes = b""

    def encode(self) -> bytes:
        """Returns JSON, so that Ray moves bytes only."""
        return msgspec.json.encode(self)


def decode_address(data: bytes) -> ReplicaAddress:
    """Returns the address. Raises msgspec.DecodeError for other bytes."""
    return msgspec.json.decode(data, type=ReplicaAddress)
