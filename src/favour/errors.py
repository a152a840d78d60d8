"""Every error Favour raises derives from `FavourError` and from the built-in it resembles.

So `except favour.FavourError` catches all of them, and code that already expects a `ValueError` or a
`TypeError` keeps working. Its warnings derive from `FavourWarning`, so that one filter holds for all of them.
"""

import contextlib
from collections.abc import Iterator

__all__ = [
    "AmbiguousOutputs",
    "CaptureError",
    "ChangedModel",
    "CorruptFile",
    "DeprecatedName",
    "DivergedFit",
    "FailedPrediction",
    "FavourError",
    "FavourWarning",
    "InsufficientMemory",
    "InvalidType",
    "InvalidValue",
    "MissingExtra",
    "NoDensity",
    "NotCalibrated",
    "NothingUncertain",
    "OutOfRange",
    "PickledPredictor",
    "ReducedCovariance",
    "ShapeMismatch",
    "SilencedDropout",
    "StalePredictor",
    "UncheckedFile",
    "UnknownName",
    "UnsupportedOperation",
    "UntrustedBelief",
    "computing",
]


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


class StalePredictor(FavourError, RuntimeError):
    """The model was changed after it was compiled, so that the predictor no longer describes it."""


class NotCalibrated(FavourError, RuntimeError):
    """An interval for observations was asked of something that knows only the spread of the network."""


class NoDensity(FavourError, ValueError):
    """The distribution is degenerate, so it has no density with respect to Lebesgue measure."""


class CorruptFile(FavourError, ValueError):
    """A file is not what it claims to be, or was damaged."""


class FailedPrediction(FavourError, RuntimeError):
    """What a model file asks for cannot be computed; the message says what torch or onnxruntime said."""


class InsufficientMemory(FavourError, MemoryError):
    """A method would need more memory than there is; nothing of that size was taken."""


class DivergedFit(FavourError, ArithmeticError):
    """A fit became NaN or grew beyond bounds.

    Attributes:
        fitted: The last good state, a `favour.Fitted`; None if there is none.
    """

    def __init__(self, message: str, fitted: object = None) -> None:
        super().__init__(message)
        self.fitted = fitted


class MissingExtra(FavourError, ImportError):
    """An optional package is not installed; the message says which extra brings it."""


@contextlib.contextmanager
def computing(file: str) -> Iterator[None]:
    """Whatever goes wrong inside is what a file asked for: a `FailedPrediction`. Errors of ours, and a full GPU, pass.

    Args:
        file: Its name.
    """
    try:
        yield
    except FavourError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which callers answer with smaller batches
            raise
        words = (str(error).strip().splitlines() or [""])[0][:300]
        raise FailedPrediction(
            f"what `{file}` describes cannot be computed for these inputs: {type(error).__name__}: {words}"
        ) from error


class FavourWarning(UserWarning):
    """The root of Favour's warnings: an answer is given, and something about it should be known."""


class NothingUncertain(FavourWarning):
    """The model has no noise that reaches its outputs: every variance is 0."""


class UntrustedBelief(FavourWarning):
    """Samples of the model disagree with its beliefs; the message gives the figures and what to do."""


class ChangedModel(FavourWarning):
    """The model was changed after it was compiled, in a way that a predictor cannot follow."""


class ReducedCovariance(FavourWarning):
    """A covariance holds less than what the model's outputs have; the message says what is left out."""


class OutOfRange(FavourWarning):
    """An approximation was used outside the range in which it holds."""


class SilencedDropout(FavourWarning):
    """Dropout that the model has was left out of its beliefs."""


class AmbiguousOutputs(FavourWarning):
    """Outputs look like probabilities where logits are expected; the message says how they were taken."""


class UncheckedFile(FavourWarning):
    """A file has no checksum, so damage to it may go unnoticed; the message says how to write it again."""


class PickledPredictor(FavourWarning):
    """`torch.save` was given a predictor, which has a `save` of its own."""


class DeprecatedName(FavourWarning, DeprecationWarning):
    """A name that still works and will go."""
