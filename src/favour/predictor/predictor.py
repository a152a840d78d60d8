"""The `Predictor`: a network that answers with beliefs, and what people ask of one.

`favour.program` does the work; class scores are `favour.classify`'s, explanations `favour.inspect`'s.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.belief import intervals
from favour.classify import classes
from favour.classify.calibration import Calibrated, with_noise
from favour.classify.head import find_head, remember_call
from favour.errors import PickledPredictor
from favour.inspect import describe
from favour.inspect.attribution import Attribution
from favour.inspect.expected import Expected, expected
from favour.inspect.explain import Explanation, explanation, stand_in
from favour.inspect.selfcheck import SelfCheck
from favour.methods import Adjoint
from favour.methods.adjoint import ReverseSweep
from favour.predictor.streaming import stream
from favour.program import saving
from favour.program.arguments import accepts_arrays
from favour.program.program import Program
from favour.program.propagator import Propagator

__all__ = ["Predictor", "from_bytes", "load", "to_bytes"]


class Predictor(Propagator):
    """Predicts beliefs. Made by `favour.compile` or `favour.load`."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.checked = SelfCheck()  # against samples, when it was compiled
        self.tuned: Any = None  # what `favour.tune` measured, if it made this

    def __repr__(self) -> str:
        """The method and its cost, the sources of noise, and what the check at compile time found."""
        said = describe.described(self, self.checked).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {said}\n)"

    def _repr_html_(self) -> str:
        return describe.html(self, self.checked)

    @accepts_arrays
    def logits(self, *args: Any, **kwargs: Any) -> Any:
        """The belief over class scores: what the model returns, less the softmax or sigmoid that it ends in.

        Scores need it: `favour.scores.entropy(predict.logits(x))`. Where the model returns logits this is a call of
        the predictor, but that of very many outputs those directions are followed which probabilities see.

        Raises:
            UnsupportedOperation: The model returns probabilities of which its graph has no logits.

        Example:
            >>> import favour
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3), nn.Softmax(-1))
            >>> belief = favour.compile(model, torch.randn(2, 4)).logits(torch.randn(5, 4))
            >>> bool((belief.mean < 0).any())
            True
        """
        self.follow()
        return classes.logits(self, args, kwargs)

    @accepts_arrays
    def probabilities(
        self, *args: Any, kind: str | None = None, estimator: str = "auto", draws: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Class probabilities E[softmax(z)], (batch, C), z the logits.

        A softmax or sigmoid that the model ends in is not taken twice: its logits are used, or, where the graph has
        none, its probabilities as they are.

        Args:
            args, kwargs: The model's.
            kind: See `favour.probabilities`; by default what the model's last operations say.
            estimator: `"head"` (fixed draws of the last layers, see `favour.classify.head`), or one of those of
                `favour.probabilities`. By default the head where its draws take no longer than a forward pass (by
                a count of operations), else `"nodes"`.
            draws: At least so many draws of the head, instead of as many as take a forward pass. Their average has
                the error of an average: a negative log-likelihood is off by a multiple of one over their number.
        """
        self.follow()
        return classes.probabilities(self, args, kwargs, kind, estimator, draws)

    def answered(self, args: tuple, kwargs: dict[str, Any], beliefs: list[Any]) -> None:
        """What a belief is asked later may want its call."""
        if len(beliefs) == 1:
            remember_call(self, args, kwargs, beliefs[0])

    def prepare(self) -> None:
        """Make what is made once, for plain inputs: `torch.compile`, the next caller maybe, cannot."""
        super().prepare()
        find_head(self)
        if classes.ending_of(self).logits is not None:
            classes.classifier(self)

    def with_noise(self, variance: float | Tensor) -> Calibrated:
        """A predictor of observations: beliefs gain this variance, and `interval` answers.

        Args:
            variance: s² of the observation noise, broadcastable to an output; `favour.fit_noise` finds it.

        Example:
            >>> import favour
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
            >>> predict, x, y = favour.compile(model, torch.zeros(2, 3)), torch.randn(50, 3), torch.randn(50, 1)
            >>> low, high = predict.with_noise(favour.fit_noise(predict(x), y)).interval(x, 0.9)
            >>> low.shape
            torch.Size([50, 1])
        """
        return with_noise(self, variance)

    def interval(self, *args: Any, level: float | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: the spread of a network is not the error of its prediction (see `favour.belief.intervals`).

        Raises:
            NotCalibrated: Always; the message says how to get what can answer.
        """
        raise intervals.refuse()

    @accepts_arrays
    def jsd(
        self, *args: Any, kind: str | None = None, estimator: str = "auto", draws: int | None = None, **kwargs: Any
    ) -> Tensor:
        """How much draws of the network disagree about the class, (batch,): between 0 and log C, high is unfamiliar.

        The Jensen–Shannon divergence of `favour.scores.jsd`, which knows the belief only. That is Gaussian, and where
        dropout is strong the logits are not: confident inputs then keep their class in draws in which a Gaussian
        of the same variance would change it.

        Args:
            args, kwargs: The model's.
            kind: `"softmax"`, or `"binary"` for one logit.
            estimator: `"head"` (fixed draws of the last layers), `"nodes"` or `"lemma"` (see `favour.scores.jsd`). By
                default the head, with as many draws as two forward passes or 2²⁴ multiplications for each input afford,
                160 to 2,560; `"nodes"` where that is less than 160, or there is no head.
            draws: At least so many draws of the head instead.

        Raises:
            UnsupportedOperation: The model returns probabilities that are no softmax of logits in its graph.

        Example:
            >>> import favour
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
            >>> favour.compile(model, torch.randn(2, 4)).jsd(torch.randn(5, 4)).shape
            torch.Size([5])
        """
        self.follow()
        return classes.divergence(self, args, kwargs, kind, estimator, draws)

    @accepts_arrays
    def draws(self, *args: Any, n: int | None = None, **kwargs: Any) -> Tensor:
        """Draws of the logits from the last layers, (n, batch, C), fixed for an input: see `favour.classify.head`.

        `favour.scores` takes them like samples: `scores.jsd(predict.draws(x))` keeps what a Gaussian loses.

        Args:
            args, kwargs: The model's.
            n: At least so many; by default what `probabilities` takes.

        Raises:
            UnsupportedOperation: The network has no head, as `favour.classify.head` defines it.

        Example:
            >>> import favour
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
            >>> favour.compile(model, torch.randn(2, 4)).draws(torch.randn(5, 4), n=960).shape
            torch.Size([960, 5, 3])
        """
        return classes.draws(self, args, kwargs, n)

    @accepts_arrays
    def attribute(self, *args: Any, **kwargs: Any) -> Any:
        """How much of each output's variance comes from which dropout, parameter or nonlinearity.

        Returns:
            An `Attribution` for each output, in the structure of the model's output.
        """
        bound, method = self.program.bind(self.program.inputs(args, kwargs))
        parts = (method if isinstance(method, ReverseSweep) else Adjoint()).parts(bound)
        outputs = [Attribution.of(mean, grams) if isinstance(mean, Tensor) else mean for mean, grams in parts]
        return pytree.tree_unflatten(outputs, self.graph.out_spec)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Operation by operation, by which rule uncertainty went through, how exactly, and what was left out and why.

        Args:
            args, kwargs: The model's, to see variances before and after each operation; without any, the rest is told.

        Returns:
            An `Explanation`; print it.

        Example:
            >>> import favour
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
            >>> [o.exactness for o in favour.compile(model, torch.randn(4, 3)).explain().operations]
            ['exact', 'exact', 'moment-matched', 'exact']
        """
        program = self.program
        self.follow()
        leaves = program.inputs(args, kwargs) if args or kwargs else stand_in(self.graph, program.sizes)
        bound, method = program.bind(leaves)
        return explanation(bound, method, bool(args or kwargs))

    def cost(self, *args: Any, **kwargs: Any) -> Expected:
        """What predictions are expected to take in eager code, counted from two small passes; nothing is timed.

        Args:
            args, kwargs: The model's, one input or more.

        Returns:
            `seconds(n)` of one core of a CPU and `forwards(n)`, in forward passes, for n inputs at a time.

        Example:
            >>> import favour
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
            >>> expected = favour.compile(model, torch.randn(4, 3)).cost(torch.randn(1, 3))
            >>> expected.forwards(1) > expected.forwards(100_000)
            True
        """
        return expected(self, args, kwargs)

    def stream(
        self,
        loader: Iterable[Any],
        device: str | torch.device | None = None,
        *,
        results: Sequence[str] | Mapping[str, Callable[[Any], Any]] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        compiled: bool = False,
        prefetch: int = 2,
        progress: bool = True,
    ) -> Iterator[Any]:
        """Predict a loader's batches, in order, loading and copying while computing (see `favour.predictor.streaming`).

        Args:
            loader: Yields tensors, tuples that begin with the model's arguments (labels may follow), or dicts with
                entries named as the model's arguments.
            device: Where to compute; a copy of the predictor goes there if it is elsewhere. Its own by default.
            results: What to yield: names among mean, variance, stddev, covariance_matrix, probabilities and batch (as
                the loader gave it), or a mapping from names to functions of what the predictor returns. Results come
                as dicts of tensors on the host, while beliefs, the default, stay on the device.
            inputs: Takes the model's arguments from a batch, where the rules above do not serve: a function that
                returns a tensor, a tuple of arguments or a dict of keyword arguments.
            compiled: Through `torch.compile`, for batches of the first one's shape; a smaller last one runs as it is.
            prefetch: How many batches may wait.
            progress: Show a bar on a terminal once this takes over two seconds.

        Returns:
            An iterator. Errors name the batch they happened in, counted from 0.

        Example:
            >>> import favour
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
            >>> predict = favour.compile(model, torch.randn(4, 3))
            >>> loader = [(torch.randn(4, 3), torch.zeros(4)), (torch.randn(1, 3), torch.zeros(1))]
            >>> [tuple(found["stddev"].shape) for found in predict.stream(loader, results=["mean", "stddev"])]
            [(4, 2), (1, 2)]
        """
        return stream(self, loader, device, results, inputs, compiled, prefetch, progress)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole predictor: graph, tensors, posterior and settings. No code is pickled; see `favour.load`.

        The file carries a checksum, and takes the place of an earlier one in one step, also where several processes
        save to one path.
        """
        saving.write(self.program, path)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For pickle, `torch.save` and other processes: the bytes of a saved file, without the model and its code."""
        if protocol == 2:  # torch.save's own, which pickle itself has not used since Python 3.0
            warnings.warn(
                "torch.save writes a pickle, which `torch.load` refuses by default and which can hold code; "
                "`predict.save(path)` and `favour.load(path)` keep the whole predictor without.",
                PickledPredictor,
                stacklevel=4,
            )
        rest = {"checked": self.checked, "training": self.training}
        return from_bytes, (to_bytes(self), str(self.device)), rest


def load(path: str | os.PathLike[str]) -> Predictor:
    """Read a predictor that `Predictor.save` wrote. Executes no code from the file.

    Raises:
        CorruptFile: Not such a file, damaged, or from a newer version.

    Warns:
        UncheckedFile: The file was written by an earlier version, without a checksum.
    """
    return _loaded(saving.read(path), os.fspath(path))


def to_bytes(predict: Predictor) -> bytes:
    """What `Predictor.save` writes."""
    return saving.to_bytes(predict.program)


def from_bytes(content: bytes, device: str = "cpu") -> Predictor:
    """The predictor whose `to_bytes` was `content`. Named in pickles of predictors."""
    return _loaded(saving.from_bytes(content), "the pickled predictor").to(device)


def _loaded(program: Program, name: str) -> Predictor:
    with saving.reading(name):
        predict = Predictor(program)
        predict.file = name
        predict.prepare()
    return predict
