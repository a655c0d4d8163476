"""The blocking client."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import ssl
import threading
import time
from types import TracebackType
from typing import Any, Iterable, Mapping

from ._errors import ConnectionLost, HttpError, RpcError, TimedOut
from ._methods import Methods
from ._wire import DEFAULT_ADDRESS, Address, Splitter, outcome, request

#: A method and its parameters.
Call = tuple[str, Mapping[str, Any]]

_RECEIVE = 1 << 18


class Client(Methods):
    """Calls methods, and waits for each reply.

    `address` is the path of a socket or the address of an HTTP server: `http://host:port`. The first call connects; after a lost
    connection, the next call connects again. `tls` sets the trusted certificates of an https address. `timeout` is the maximum duration
    of a call in seconds; None means no limit. Threads may share a client, which makes their calls one after another.
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
        self._lock = threading.Lock()
        self._last_id = 0
        self._stream: _Stream | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._hang_up()

    def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Calls any method by its name."""
        [answer] = self.call_many([(method, params or {})])
        if isinstance(answer, RpcError):
            raise answer
        return answer

    def call_many(self, calls: Iterable[Call]) -> list[Any]:
        """Makes many calls at once, without waiting in between, and returns the result or `RpcError` of each call.

        The daemon starts the calls in their order, but may complete them in another. Over HTTP, each call waits for the reply to the
        one before.
        """
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        with self._lock:
            if self._address.path is None:
                return [self._post(method, params, deadline) for method, params in calls]
            requests, methods = bytearray(), {}
            for method, params in calls:
                self._last_id += 1
                methods[self._last_id] = method
                requests += request(self._last_id, method, params)
            try:
                stream = self._connected(self._address.path)
                responses = stream.exchange(requests, set(methods), deadline)
            except BaseException:
                # Later replies on this connection would be taken for replies to other calls.
                self._hang_up()
                raise
            return [outcome(method, responses[ident]) for ident, method in methods.items()]

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _connected(self, path: str) -> _Stream:
        if self._stream is None:
            self._stream = _Stream(path)
        return self._stream

    def _post(self, method: str, params: Mapping[str, Any], deadline: float | None) -> Any:
        self._last_id += 1
        body = request(self._last_id, method, params)
        return outcome(method, post(self._address, self._tls, body, _left(deadline)))


def post(address: Address, tls: ssl.SSLContext | None, body: bytes, timeout: float | None) -> Any:
    """Makes one request over HTTP, on its own connection."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    if address.is_tls:
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=timeout, context=tls)
    headers = {"Content-Type": "application/json"}
    if address.authorization is not None:
        headers["Authorization"] = address.authorization
    try:
        connection.request("POST", address.target, body, headers)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise HttpError(response.status, response.reason)
        return json.loads(text)
    except TimeoutError as error:
        raise TimedOut(f"no answer from {address} in time") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConnectionLost(f"{address}: {error}") from error
    finally:
        connection.close()


def _left(deadline: float | None) -> float | None:
    """Seconds until the deadline."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimedOut("no answer in time")
    return left


class _Stream:
    """A connection to the daemon's socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise ConnectionLost(f"cannot reach {path}: {error.strerror}") from error
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._splitter = Splitter()

    def close(self) -> None:
        self._selector.close()
        self._socket.close()

    def exchange(self, requests: bytearray, wanted: set[int], deadline: float | None) -> dict[int, Any]:
        """Sends requests and receives replies at the same time: the daemon stops reading while its replies are not read."""
        unsent, responses = memoryview(requests), dict[int, Any]()
        while wanted:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            self._selector.modify(self._socket, events)
            ready = self._selector.select(_left(deadline))
            try:
                for _, event in ready:
                    if event & selectors.EVENT_WRITE:
                        unsent = unsent[self._socket.send(unsent) :]
                    if event & selectors.EVENT_READ:
                        self._receive(wanted, responses)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror or error}") from error
        return responses

    def _receive(self, wanted: set[int], responses: dict[int, Any]) -> None:
        data = self._socket.recv(_RECEIVE)
        if not data:
            raise ConnectionLost("the daemon closed the connection")
        for response in self._splitter.push(data):
            ident = response.get("id")
            if ident in wanted:
                wanted.discard(ident)
                responses[ident] = response
            elif ident is None:
                raise ConnectionLost(f"the daemon did not understand: {response.get('error')}")
