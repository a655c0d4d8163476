"""The errors of calls."""

from __future__ import annotations

import errno as _errno
from typing import Any, Mapping

#: The daemon's code for a method that may not be called in the present state. It is no errno, nor are JSON-RPC's codes.
_WRONG_STATE = -1
_LAST_ERRNO = 4095


class ArykError(Exception):
    """Any failure of a call."""


class ConnectionLost(ArykError, ConnectionError):
    """The daemon cannot be reached, or closed the connection before it answered; the call may have been carried out."""


class TimedOut(ArykError, TimeoutError):
    """The daemon did not answer in time; it may still carry out the call."""


class HttpError(ArykError):
    """An HTTP error status instead of a JSON-RPC answer: a wrong password gives 401."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status


class RpcError(ArykError):
    """An error of the daemon."""

    #: A negated errno, or a code of JSON-RPC.
    code: int
    #: The text of the code.
    message: str
    #: The details of the error, mostly a text.
    data: Any

    def __init__(self, method: str, error: Mapping[str, Any]) -> None:
        self.method = method
        self.code = int(error.get("code", 0))
        self.message = str(error.get("message", ""))
        self.data = error.get("data")
        detail = self.message if self.data is None else f"{self.message}: {self.data}"
        super().__init__(f"{method}: {detail} ({self.code})")

    @property
    def errno(self) -> int | None:
        """The errno, such as `errno.EEXIST`; None if the code is no errno."""
        return -self.code if -_LAST_ERRNO <= self.code < _WRONG_STATE else None

    @property
    def is_existing(self) -> bool:
        """Whether an object of that name already exists."""
        return self.errno == _errno.EEXIST

    @property
    def is_missing(self) -> bool:
        """Whether no object of that name exists."""
        return self.errno == _errno.ENODEV

    @property
    def is_busy(self) -> bool:
        """Whether the object is in use."""
        return self.errno == _errno.EBUSY
