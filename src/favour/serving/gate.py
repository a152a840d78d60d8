"""The gate before all routes: the Host check, request ids, and JSON for whatever goes wrong behind it.

**Host check.** A page of `evil.example` whose name was rebound to 127.0.0.1 may talk to a server on the visitor's own
machine as if it were its own (DNS rebinding), but its browser says `Host: evil.example`. So names that are not known
are answered 421. Where a server listens on all addresses it cannot know which of them clients use; then every IP
address will do, since an address cannot be rebound. A request without the header is not from a browser.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from favour.serving.refusals import ID, Refused, error_body, request_id, shortened

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\\?#\s]+))(?::\d{0,5})?")
log = logging.getLogger("favour.serving")


class Hosts:
    """The names by which clients may address the server.

    Args:
        names: Without ports; `*` allows every name. An unspecified address (0.0.0.0, ::) stands for every IP address.

    >>> "localhost:8000" in Hosts(["localhost"]), "evil.example" in Hosts(["localhost"])
    (True, False)
    >>> "192.168.1.7:8000" in Hosts(["0.0.0.0"]), "evil.example" in Hosts(["0.0.0.0"])
    (True, False)
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = {_plain(name.strip("[]")) for name in names}
        self._all = "*" in self.names
        self._addresses = any((a := _address(name)) is not None and a.is_unspecified for name in self.names)

    def __contains__(self, header: str) -> bool:
        if self._all:
            return True
        match = _HOST.fullmatch(header.strip())
        if match is None:
            return False
        name = _plain(match[1] or match[2])
        return name in self.names or (self._addresses and _address(name) is not None)


def _plain(name: str) -> str:
    address = _address(name)
    return str(address) if address is not None else name.lower().rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class Gate:
    """ASGI middleware.

    Args:
        app: What lies behind.
        hosts: See `Hosts`.
        observe: Told path, status and seconds of every request; 499 where the client left before an answer.
    """

    def __init__(self, app: App, hosts: Hosts, observe: Callable[[str, int, float], None]) -> None:
        self.app, self.hosts, self.observe = app, hosts, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 499
        headers = {name: value for name, value in scope["headers"] if name in (b"x-request-id", b"host")}
        scope[ID] = identity = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", identity.encode())]
            await send(message)

        try:
            self._check_host(headers.get(b"host"))
            await self.app(scope, receive, answer)
        except Refused as refusal:
            await self._refuse(answer, refusal, identity)
        except Exception:
            log.exception("request %s failed", identity)
            if status == 499:
                words = "the server failed; its log says why, under the id of this request."
                await self._refuse(answer, Refused(500, words), identity)
        finally:
            self.observe(scope["path"], status, time.perf_counter() - start)

    def _check_host(self, header: bytes | None) -> None:
        if header is not None and (name := header.decode("latin-1")) not in self.hosts:
            raise Refused(
                421,
                f"this server does not answer to the host {shortened(name)}; whoever runs it can add the name: "
                "favour serve --allow-host NAME.",
            )

    async def _refuse(self, send: Send, refusal: Refused, identity: str) -> None:
        body = error_body(refusal.words, identity)
        headers = {"content-type": "application/json", "content-length": str(len(body))} | refusal.headers
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})
