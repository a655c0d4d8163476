"""A client of arykd, the daemon that carries the I/O of virtual machines' disks.

`Client` waits for each reply, `AsyncClient` is awaited. Both have a function for each of the daemon's methods, of the same
name and with the same parameters; results are those of the wire, typed in `aryk.types`.
"""

from . import types
from ._aio import AsyncClient
from ._client import Client
from ._errors import ArykError, ConnectionLost, HttpError, RpcError, TimedOut
from ._version import VERSION as __version__
from ._wire import DEFAULT_ADDRESS

__all__ = [
    "DEFAULT_ADDRESS",
    "ArykError",
    "AsyncClient",
    "Client",
    "ConnectionLost",
    "HttpError",
    "RpcError",
    "TimedOut",
    "__version__",
    "types",
]
