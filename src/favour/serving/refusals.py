"""Refusals: every answer that is no success is JSON with a sentence and the request's id."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

SANE_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
ID = "favour.request_id"  # in the ASGI scope


class Refused(Exception):
    """A request that is answered with an HTTP status and a sentence."""

    def __init__(self, status: int, words: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(words)
        self.status, self.words, self.headers = status, words, dict(headers or {})


class Gone(Exception):
    """The client left before its request had arrived; there is nobody to answer."""


def request_id(header: str | None) -> str:
    """The client's own id where it is short and printable, so that it can be written to a log; a new one otherwise.

    >>> request_id("order-17")
    'order-17'
    >>> len(request_id("two\\nlines"))
    32
    """
    return header if header is not None and SANE_ID.fullmatch(header) else uuid.uuid4().hex


def error_body(words: str, request: str) -> bytes:
    """ASCII whatever the words hold: a lone surrogate from a client's JSON cannot be encoded otherwise."""
    return json.dumps({"error": words, "request": request}).encode("ascii")


def shortened(value: Any, most: int = 40) -> str:
    """A client's own words in a sentence of ours: quoted, escaped and short."""
    text = ascii(value)
    return text if len(text) <= most else text[: most - 1] + "…"
