"""The client for asyncio."""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType
from typing import Any, Mapping

from ._client import post
from ._errors import ConnectionLost, RpcError, TimedOut
from ._methods import AsyncMethods
from ._wire import DEFAULT_ADDRESS, Address, Splitter, outcome, request

_RECEIVE = 1 << 18


class AsyncClient(AsyncMethods):
    """Calls methods on one connection, from any number of tasks at a time.

    `address` is the path of a socket or the address of an HTTP server: `http://host:port`; each HTTP call uses its own connection. The
    first call connects; after a lost connection, the next call connects again. `timeout` is the maximum duration of a call in seconds;
    None means no limit. `tls` sets the trusted certificates of an https address. The daemon may still carry out a call that was
    cancelled or timed out.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = 60.0,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        #: The maximum duration of a call, in seconds.
        self.timeout = timeout
        self._address = Address.parse(address, username, password)
        self._tls = tls
        self._last_id = 0
        self._connecting: asyncio.Task[_Stream] | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls that wait for a reply fail."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            try:
                stream = await connecting
            except ConnectionLost:
                return
            await stream.close()

    async def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Calls any method by its name."""
        self._last_id += 1
        ident = self._last_id
        body = request(ident, method, params)
        try:
            if self._address.path is None:
                response = await asyncio.to_thread(post, self._address, self._tls, body, self.timeout)
            else:
                asking = self._ask(self._address.path, ident, body)
                response = await asyncio.wait_for(asking, self.timeout)
        except asyncio.TimeoutError as error:
            raise TimedOut(f"{method}: no answer in time") from error
        answer = outcome(method, response)
        if isinstance(answer, RpcError):
            raise answer
        return answer

    async def _ask(self, path: str, ident: int, body: bytes) -> Any:
        stream = await self._connected(path)
        return await stream.ask(ident, body)

    async def _connected(self, path: str) -> _Stream:
        connecting = self._connecting
        if connecting is None or (connecting.done() and not _is_open(connecting)):
            connecting = self._connecting = asyncio.ensure_future(_Stream.connect(path))
        # Another call may wait for the same connection: connecting goes on if this call is cancelled.
        return await asyncio.shield(connecting)


def _is_open(connecting: asyncio.Task[_Stream]) -> bool:
    return not connecting.cancelled() and connecting.exception() is None and connecting.result().is_open


class _Stream:
    """A connection to the daemon's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.is_open = True
        self._receiving = asyncio.ensure_future(self._receive())

    @classmethod
    async def connect(cls, path: str) -> _Stream:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise ConnectionLost(f"cannot reach {path}: {error.strerror}") from error
        return cls(reader, writer)

    async def close(self) -> None:
        self._receiving.cancel()
        # The receiving task fails the waiting calls.
        await asyncio.wait([self._receiving])

    async def ask(self, ident: int, body: bytes) -> Any:
        if not self.is_open:
            raise ConnectionLost("the connection is closed")
        answer = self._waiting[ident] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(body)
            await self._writer.drain()
            return await answer
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror or error}") from error
        finally:
            del self._waiting[ident]
            if answer.done() and not answer.cancelled():
                # Marks the exception as retrieved, so that asyncio does not warn.
                answer.exception()

    async def _receive(self) -> None:
        splitter, why = Splitter(), ConnectionLost("the client closed the connection")
        try:
            while data := await self._reader.read(_RECEIVE):
                for response in splitter.push(data):
                    self._settle(response)
            why = ConnectionLost("the daemon closed the connection")
        except ConnectionLost as error:
            why = error
        except OSError as error:
            why = ConnectionLost(f"the connection broke: {error.strerror or error}")
        finally:
            self.is_open = False
            self._writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(why)

    def _settle(self, response: Any) -> None:
        ident = response.get("id")
        if ident is None:
            raise ConnectionLost(f"the daemon did not understand: {response.get('error')}")
        # No task waits for the reply to a call that was cancelled.
        answer = self._waiting.get(ident)
        if answer is not None and not answer.done():
            answer.set_result(response)
