"""Every error Favour raises derives from `FavourError` and from the built-in it resembles.

So `except favour.FavourError` catches all of them, and code that already expects a `ValueError` or a
`TypeError` keeps working.
"""


class FavourError(Exception):
    """The root of Favour's errors."""


class InvalidValue(FavourError, ValueError):
    """An argument has a value that makes no sense here: a NaN, a negative variance, p outside [0, 1)."""


class ShapeMismatch(FavourError, ValueError):
    """Two things that have to fit together do not: the message states both shapes."""


class InvalidType(FavourError, TypeError):
    """An argument has the wrong type or dtype."""


class UnknownName(FavourError, KeyError, ValueError):
    """A parameter or module was named that the model does not have."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class UnsupportedOperation(FavourError, NotImplementedError):
    """The model uses operations for which no rule is registered, or a rule cannot serve this use."""


class CaptureError(FavourError, RuntimeError):
    """`torch.export` could not capture the model."""


class NoDensity(FavourError, ValueError):
    """The distribution is degenerate, so it has no density with respect to Lebesgue measure."""


class CorruptFile(FavourError, ValueError):
    """A file is not what it claims to be, or was damaged."""


class MissingExtra(FavourError, ImportError):
    """An optional package is not installed; the message says which extra brings it."""
