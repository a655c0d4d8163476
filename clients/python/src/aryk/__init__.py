"""A client of arykd, the daemon that serves the disks of virtual machines.

`Client` blocks until each reply, `AsyncClient` is for asyncio. Both have a function for each of the daemon's methods, with the same
name and the same parameters; results are those of the wire, typed in `aryk.types`.
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
