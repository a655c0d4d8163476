"""The daemon's JSON-RPC 2.0 wire format: a sequence of objects without frames."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any, Mapping
from urllib.parse import unquote, urlsplit

from ._errors import ConnectionLost, RpcError

#: The default socket of arykd, and of SPDK.
DEFAULT_ADDRESS = "/var/tmp/spdk.sock"

_QUOTE = b'"'


@dataclass(frozen=True)
class Address:
    """The address of the daemon: the path of a socket, or an HTTP server."""

    path: str | None = None
    host: str = ""
    port: int = 0
    target: str = "/"
    is_tls: bool = False
    authorization: str | None = None

    @classmethod
    def parse(cls, text: str, username: str | None, password: str | None) -> Address:
        """`/path`, `unix:/path`, `http://host:port` or `https://…`; an HTTP address may contain user and password."""
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https"):
            if username is not None or password is not None:
                raise ValueError("a UNIX socket asks for no password")
            path = text.removeprefix("unix://") if text.startswith("unix://") else text.removeprefix("unix:")
            return cls(path=path)
        if parts.hostname is None:
            raise ValueError(f"{text!r} names no host")
        username = username if username is not None else unquote(parts.username or "")
        password = password if password is not None else unquote(parts.password or "")
        authorization = None
        if username or password:
            authorization = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        return cls(None, parts.hostname, port, parts.path or "/", is_tls, authorization)

    def __str__(self) -> str:
        return self.path if self.path is not None else f"{self.host}:{self.port}"


class Splitter:
    """Splits a stream into JSON values, and scans each byte once."""

    _TOKEN = re.compile(rb'[{}\[\]]|"(?:[^"\\]|\\.)*"|"', re.DOTALL)

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0
        self._depth = 0

    def push(self, data: bytes) -> list[Any]:
        """Adds received bytes; returns the complete values."""
        self._buffer += data
        values: list[bytes] = []
        start = 0
        for token in self._TOKEN.finditer(self._buffer, self._at):
            text = token.group()
            if text == _QUOTE:
                # An incomplete string: the next push scans it again from its start.
                self._at = token.start()
                break
            self._at = token.end()
            if text in (b"{", b"["):
                self._depth += 1
            elif text in (b"}", b"]"):
                self._depth -= 1
                if self._depth <= 0:
                    values.append(bytes(self._buffer[start : self._at]))
                    self._depth, start = 0, self._at
        else:
            self._at = len(self._buffer)
        del self._buffer[:start]
        self._at -= start
        try:
            return [json.loads(value) for value in values]
        except ValueError as error:
            raise ConnectionLost(f"the daemon's answer is no JSON: {error}") from error


def request(ident: int, method: str, params: Mapping[str, Any] | None) -> bytes:
    """The bytes of a call."""
    call: dict[str, Any] = {"jsonrpc": "2.0", "id": ident, "method": method}
    if params:
        call["params"] = dict(params)
    return json.dumps(call, separators=(",", ":")).encode()


def outcome(method: str, response: Mapping[str, Any]) -> Any | RpcError:
    """The result of a response, or its error."""
    error = response.get("error")
    return response.get("result") if error is None else RpcError(method, error)
