"""HTTP to an OpenAI-compatible server: time limits, retries with back-off, calls that can be called off, and no secret in any message."""

from __future__ import annotations

import email.utils
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rlpipe.errors import EngineError
from rlpipe.redaction import without_secrets

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses that another try may mend."""
FATAL = {
    401: "give the key in the variable that engine.api_key_env names",
    403: "give a key that may use this model in the variable that engine.api_key_env names",
    404: "check engine.base_url, which usually ends in /v1, and engine.model",
    405: "check engine.base_url, which usually ends in /v1",
}
"""Statuses that say the same to every request, and what to do."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
EXCERPT = 300


class RequestFailed(Exception):
    """One request came to nothing; others may fare better."""


class CalledOff(RequestFailed):
    """The request was called off, or the client is closed."""


class _Again(Exception):
    """A try came to nothing; `wait` is what the server asks to wait, in seconds, `lost` whether it said nothing at all."""

    def __init__(self, reason: str, wait: float | None = None, lost: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.lost = wait, lost


@dataclass
class Client:
    """Asks one server.

    Attributes:
        base_url: with the path before `/completions`, without credentials.
        key: bearer token.
        timeout_seconds: of one try, from connecting to the last byte; a longer wait that the server asks for is not waited.
        retries: tries after the first one.
        check: raises EngineError if the server is known to be gone; called where it said nothing.
    """

    base_url: str
    key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 600.0
    retries: int = 4
    check: Callable[[], None] | None = None
    _open: dict[str, http.client.HTTPConnection] = field(default_factory=dict, repr=False)
    _called_off: set[str] = field(default_factory=set, repr=False)
    _closed: threading.Event = field(default_factory=threading.Event, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, name: str = "") -> dict[str, Any]:
        """The JSON object that the server answers with.

        Args:
            name: names the call for `call_off`.

        Raises:
            RequestFailed: no usable answer after every try, or the server refuses this request.
            EngineError: the server refuses every request, or is gone.
        """
        for k in range(self.retries + 1):
            try:
                return self._try(method, path, body, name)
            except _Again as error:
                reason, wait = str(error), error.wait
                if error.lost and self.check is not None:
                    self.check()
            if wait is not None and wait > self.timeout_seconds:
                raise RequestFailed(self._hidden(f"{reason}; the server asks to wait {wait:g} s, longer than the time limit of {self.timeout_seconds:g} s"))
            pause = min(FIRST_WAIT_SECONDS * 2**k, LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0) if wait is None else wait
            if k < self.retries and self._closed.wait(pause):
                raise CalledOff("the engine was closed")
        raise RequestFailed(self._hidden(f"no answer in {self.retries + 1} tries, the last time: {reason}"))

    def call_off(self, name: str) -> None:
        """End a call that is under way, which then raises `CalledOff`; the server sees the connection close."""
        with self._lock:
            self._called_off.add(name)
            connection = self._open.get(name)
        _hang_up(connection)

    def close(self) -> None:
        """End every call; the client asks no more."""
        self._closed.set()
        with self._lock:
            connections = list(self._open.values())
        for connection in connections:
            _hang_up(connection)

    def _try(self, method: str, path: str, body: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
        until = time.monotonic() + self.timeout_seconds
        connection = self._connection()
        with self._lock:
            self._open[name] = connection
        try:
            connection.connect()
            # whoever calls off from here on finds the socket
            self._check_wanted(name)
            status, headers, content = self._answer(connection, method, path, body, until)
        except (OSError, http.client.HTTPException) as error:
            self._check_wanted(name)
            raise _Again(_named(error, self.timeout_seconds), lost=True) from None
        finally:
            connection.close()
            with self._lock:
                self._open.pop(name, None)
        return self._understood(status, headers, content)

    def _check_wanted(self, name: str) -> None:
        if name in self._called_off or self._closed.is_set():
            raise CalledOff("called off")

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=self.timeout_seconds)

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None, until: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        headers = {"Accept": "application/json", "Connection": "close"}
        headers |= {"Content-Type": "application/json"} if body is not None else {}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connection.request(method, urlsplit(self.base_url).path.rstrip("/") + path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        pieces = []
        # a server that sends a byte now and then would keep every single read within its limit
        while piece := response.read1(1 << 16):
            pieces.append(piece)
            if time.monotonic() > until:
                raise TimeoutError
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return response.status, response.headers, b"".join(pieces)

    def _understood(self, status: int, headers: http.client.HTTPMessage, content: bytes) -> dict[str, Any]:
        text = " ".join(content.decode("utf-8", errors="replace").split())[:EXCERPT]
        if status in RETRIED or status >= 500:
            raise _Again(f"status {status} {text}".strip(), retry_after(headers.get("Retry-After")))
        if status in FATAL or 300 <= status < 400:
            do = FATAL.get(status, "set engine.base_url to where it redirects to")
            raise EngineError(self._hidden(f"{self.base_url} refuses with status {status}"), got=self._hidden(text) or None, do=do)
        if status != 200:
            raise RequestFailed(self._hidden(f"the server refuses the request with status {status} {text}".strip()))
        try:
            answer = json.loads(content)
        except ValueError:
            raise _Again(f"the answer is not JSON: {text[:80]}") from None
        if not isinstance(answer, dict):
            raise _Again("the answer is no JSON object")
        return answer

    def _hidden(self, text: str) -> str:
        return without_secrets(text.replace(self.key, "***") if self.key else text)


def _hang_up(connection: http.client.HTTPConnection | None) -> None:
    if connection is not None and connection.sock is not None:
        with suppress(OSError):
            # the plain socket's: TLS would want to take leave of a thread that still reads
            socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


def _named(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return " ".join(f"{type(error).__name__} {error}".split())[:EXCERPT]


def retry_after(value: str | None) -> float | None:
    """Seconds that a `Retry-After` header names, as a number or as a date (RFC 9110, section 10.2.3); None if it names none."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds)
