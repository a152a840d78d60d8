"""What clients may ask of a server, and what all of them together may hold."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import TracebackType

from favour.errors import FavourError, InvalidValue


class Overloaded(FavourError, RuntimeError):
    """More waits than the server may hold; try again later."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, what all may hold together, and how requests are gathered.

    Attributes:
        max_batch: Most rows of one request, and of one call of the model.
        max_wait_ms: How long a request waits for others to share a call with.
        max_call_ms: How long a call of the model should take at most while requests of a few rows and of many wait
            together. Those of many rows are taken in pieces, so that others wait for a piece only.
        max_queue: Most requests that wait; more are answered 503.
        max_body: Bytes of one request.
        timeout: Seconds in which a request must have arrived, again in which it must be answered, and again in which
            its client must have read the answer.
        max_values: Most numbers in one request; less where the model's shapes say that it cannot take as many.
        max_held_values: Most numbers, in and out, of all requests that are being answered; more are answered 503, but
            for requests of up to a `SMALL`th of it, so that large ones cannot keep small ones out.
        max_held_bytes: Most bytes of bodies that are being read, and of answers that wait for their clients; the first
            `UNCOUNTED` bytes of a body are free, so that large bodies cannot keep small ones out.
        max_connections: Most connections. A new one takes the place of the one that has kept us waiting longest.
        header_timeout: Seconds in which the head of a request must have arrived.
        min_rate: Bytes per second that a body has to arrive with on average, after the first `GRACE` seconds.
    """

    max_batch: int = 256
    max_wait_ms: float = 2.0
    max_call_ms: float = 3.0
    max_queue: int = 1024
    max_body: int = 16 * 2**20
    timeout: float = 30.0
    max_values: int = 2**20
    max_held_values: int = 2**23
    max_held_bytes: int = 2**26
    max_connections: int = 1000
    header_timeout: float = 10.0
    min_rate: float = 1000.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise InvalidValue(f"`{field.name}` is {value}; at least 1 is required.")
        if not all(value >= 0 for value in (self.max_wait_ms, self.max_call_ms, self.min_rate)):
            raise InvalidValue("`max_wait_ms`, `max_call_ms` and `min_rate` must be at least 0.")
        if not self.timeout > 0 or not self.header_timeout > 0:
            raise InvalidValue("`timeout` and `header_timeout` must be more than 0.")
        for one, most in (("max_values", "max_held_values"), ("max_body", "max_held_bytes")):
            if getattr(self, one) > getattr(self, most):
                raise InvalidValue(
                    f"`{one}` is {getattr(self, one)}, more than the {getattr(self, most)} that `{most}` allows all "
                    f"requests together: such a request could never be taken. Raise `{most}` too."
                )


GRACE = 5.0
UNCOUNTED = 2**16
SMALL = 2**11


class Capacity:
    """How much of something all requests together may hold; `always` is granted to each."""

    def __init__(self, most: int, what: str, always: int = 0) -> None:
        self.most, self.what, self.always = most, what, always
        self.held = 0

    def hold(self) -> Held:
        """What one request holds: nothing yet, and nothing any more when the `with` block ends."""
        return Held(self)


class Held:
    """One request's share of a `Capacity`."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity, self.amount = capacity, 0

    def add(self, amount: int) -> None:
        """Take more, which is always granted to a request that is the only one.

        Raises:
            Overloaded: All requests together would hold too much.
        """
        capacity = self._capacity
        others = capacity.held - self.amount
        if others and self.amount + amount > capacity.always and capacity.held + amount > capacity.most:
            raise Overloaded(f"the server holds as many {capacity.what} as it may ({capacity.most}); try again later.")
        self.amount += amount
        capacity.held += amount

    def release(self) -> None:
        """Give everything back."""
        self._capacity.held -= self.amount
        self.amount = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
