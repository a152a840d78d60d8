"""`Predictor.stream`: beliefs for a whole loader, transfer and computation overlapped.

Four things go on at a time, each on another batch:

    a thread takes batches from the loader, and on the way to a GPU pins them in memory
    the next batch is copied to the device            on a CUDA stream of its own
    the current batch is predicted                    on the caller's stream
    chosen results of the last batch are copied back  on a third stream

On a CPU only the first and the third exist. Order is kept, and at most `prefetch` batches wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.errors import FavourError, InvalidType, InvalidValue
from favour.program.propagator import Propagator
from favour.progress import Bar

Results = Sequence[str] | Mapping[str, Callable[[Any], Any]]
NAMES = ("mean", "variance", "stddev", "covariance_matrix", "probabilities", "batch")


@dataclass
class _Item:
    """A batch on its way: its number, as the loader gave it, and the model's arguments."""

    number: int
    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ready: Any = None  # CUDA event of its copy

    @property
    def size(self) -> int:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return next((len(t) for t in leaves if isinstance(t, Tensor) and t.ndim), 0)


def stream(
    predict: Propagator,
    loader: Any,
    device: str | torch.device | None,
    results: Results | None,
    inputs: Callable[[Any], Any] | None,
    compiled: bool,
    prefetch: int,
    progress: bool,
) -> Iterator[Any]:
    """See `Predictor.stream`. Arguments are checked at once, not at the first batch."""
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
        raise InvalidValue(f"`prefetch` is {prefetch!r}; at least one batch has to be fetched ahead.")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InvalidType(f"`loader` is a {type(loader).__name__}; give an iterable of batches, such as a DataLoader.")
    chosen = _chosen(results)
    here = _device(predict)
    place = here if device is None else torch.device(device)
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidValue(f"`device` is {place}, and torch finds no GPU here; use cpu.")
        place = torch.empty(0, device=place).device  # with its index
    worker = predict if place == here else _copied(predict, place)
    return _stream(worker, loader, place, chosen, inputs, compiled, prefetch, progress)


def _stream(
    predict: Propagator,
    loader: Iterable[Any],
    device: torch.device,
    chosen: Results | None,
    inputs: Callable[[Any], Any] | None,
    compiled: bool,
    prefetch: int,
    progress: bool,
) -> Iterator[Any]:
    lane = _Lane(device)
    call = torch.compile(predict, fullgraph=True, dynamic=False) if compiled else predict
    bar = Bar("predicting", len(loader) if isinstance(loader, Sized) else None) if progress else None
    shape: Any = None  # of the first batch, which compiled code is for
    last: tuple[Any, Any] | None = None  # results on their way back
    with bar or nullcontext(), _Feed(predict, loader, inputs, lane, prefetch) as feed:
        item = feed.next()
        while item is not None:
            following = feed.peek()  # its copy runs while this batch is predicted
            sizes = [t.shape for t in pytree.tree_leaves((item.args, item.kwargs)) if isinstance(t, Tensor)]
            shape = sizes if shape is None else shape
            with _named(item.number):
                lane.wait(item)
                with torch.no_grad():
                    made = _results(predict, call if sizes == shape else predict, item, chosen)
            if bar is not None:
                bar.advance(item.size)
            if chosen is None:
                yield made
            else:
                if last is not None:
                    yield lane.arrived(last)
                last = lane.back(made)
                if following is None or not lane.cuda:  # nothing to do meanwhile
                    yield lane.arrived(last)
                    last = None
            item = feed.next() if following is None else following


# ---------------------------------------------------------------------------------------------------- what is asked


def _chosen(results: Results | None) -> Results | None:
    if results is None or isinstance(results, Mapping):
        return results
    names = (results,) if isinstance(results, str) else tuple(results)
    unknown = [n for n in names if n not in NAMES]
    if unknown or not names:
        raise InvalidValue(
            f"`results` is {results!r}; choose from {', '.join(NAMES)}, or give a mapping from names to functions of "
            "what the predictor returns."
        )
    return names


def _results(predict: Any, call: Callable[..., Any], item: _Item, chosen: Results | None) -> Any:
    if chosen is None:
        return call(*item.args, **item.kwargs)
    if isinstance(chosen, Mapping):
        belief = call(*item.args, **item.kwargs)
        return {name: function(belief) for name, function in chosen.items()}
    made: dict[str, Any] = {}
    belief = None
    for name in chosen:
        if name == "batch":
            made[name] = item.batch
        elif name == "probabilities":
            made[name] = predict.probabilities(*item.args, **item.kwargs)
        else:
            belief = call(*item.args, **item.kwargs) if belief is None else belief
            if not isinstance(belief, Belief):
                raise InvalidType(
                    f"the model returns a {type(belief).__name__}, not one tensor, so {name!r} is not defined; give "
                    "`results` as a mapping from names to functions of what the predictor returns."
                )
            made[name] = getattr(belief, name)
    return made


def arguments(predict: Propagator, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's arguments in a batch: what comes behind them in a tuple, such as labels, is left.

    A tensor is the one argument. Of a tuple or list the first entries are taken, as many as the model has positional
    arguments. Of a dict the entries with the names of the model's arguments are taken.
    """
    spec = predict.graph.in_spec
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    names, needed = list(kwargs), len(args)
    if isinstance(batch, Tensor | Belief):
        if needed == 1 and not names:
            return (batch,), {}
        if not needed and len(names) == 1:
            return (), {names[0]: batch}
        raise InvalidType(f"the batch is one tensor, and the model takes {_described(needed, names)}; give `inputs`.")
    if isinstance(batch, Mapping):
        input_names = [getattr(n, "name", None) for n in predict.graph.inputs[:needed]] if needed == _flat(args) else []
        missing = [n for n in (*input_names, *names) if n not in batch]
        if missing or len(input_names) != needed:
            raise InvalidType(
                f"the batch has the entries {', '.join(map(repr, batch))}, and the model takes "
                f"{_described(needed, [n for n in (*input_names, *names) if n])}; give `inputs`, a function that "
                "takes the model's arguments from a batch."
            )
        return tuple(batch[n] for n in input_names), {n: batch[n] for n in names}
    if isinstance(batch, tuple | list):
        if names or len(batch) < needed:
            raise InvalidType(
                f"the batch has {len(batch)} entries, and the model takes {_described(needed, names)}; give `inputs`, "
                "a function that takes the model's arguments from a batch."
            )
        return tuple(batch[:needed]), {}
    raise InvalidType(
        f"the batch is a {type(batch).__name__}; loaders give tensors, tuples or dicts, or give `inputs`."
    )


def _flat(args: tuple[Any, ...]) -> int:
    return len(args) if all(isinstance(a, int) for a in args) else -1


def _described(needed: int, names: Sequence[Any]) -> str:
    named = f" ({', '.join(map(repr, names))})" if names else ""
    return f"{needed or len(names)} argument{'s' * (max(needed, len(names)) != 1)}{named}"


# --------------------------------------------------------------------------------------------------------- transfer


class _Lane:
    """Copies to a device and back, on streams of their own; on a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def pinned(self, tree: Any) -> Any:
        if not self.cuda:
            return tree
        return pytree.tree_map(
            lambda t: t.pin_memory() if isinstance(t, Tensor) and t.device.type == "cpu" and t.numel() else t, tree
        )

    def send(self, item: _Item) -> _Item:
        """Start the copy to the device."""
        with torch.cuda.stream(self.up) if self.cuda else nullcontext():
            item.args, item.kwargs = pytree.tree_map(
                lambda t: t.to(self.device, non_blocking=True) if isinstance(t, Tensor) else t,
                (item.args, item.kwargs),
            )
            if self.cuda:
                item.ready = torch.cuda.Event()
                item.ready.record(self.up)
        return item

    def wait(self, item: _Item) -> None:
        """Let the current stream wait for the copy."""
        if not self.cuda:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_event(item.ready)
        for t in pytree.tree_leaves((item.args, item.kwargs)):
            if isinstance(t, Tensor) and t.is_cuda:
                t.record_stream(current)  # its memory belongs to the copying stream

    def back(self, results: dict[str, Any]) -> tuple[Any, Any]:
        """Start the copy of results to the host."""
        if not self.cuda:
            return results, None
        self.down.wait_stream(torch.cuda.current_stream(self.device))

        def copied(t: Any) -> Any:
            if not isinstance(t, Tensor) or not t.is_cuda:
                return t
            t.record_stream(self.down)
            return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)

        with torch.cuda.stream(self.down):
            results = pytree.tree_map(copied, results)
            event = torch.cuda.Event()
            event.record(self.down)
        return results, event

    def arrived(self, waiting: tuple[Any, Any]) -> Any:
        results, event = waiting
        if event is not None:
            event.synchronize()
        return results


class _Feed:
    """Takes batches from the loader in a thread of its own."""

    def __init__(
        self,
        predict: Propagator,
        loader: Iterable[Any],
        inputs: Callable[[Any], Any] | None,
        lane: _Lane,
        prefetch: int,
    ) -> None:
        self.predict, self.loader, self.inputs, self.lane = predict, loader, inputs, lane
        self.waiting: queue.Queue[_Item | BaseException | None] = queue.Queue(prefetch)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._fetch, name="favour-stream", daemon=True)

    def __enter__(self) -> _Feed:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        while self.thread.is_alive():  # it may be waiting for room
            try:
                self.waiting.get_nowait()
            except queue.Empty:
                self.thread.join(0.05)

    def peek(self) -> _Item | None:
        """The next batch if it is there, its copy to the device started."""
        try:
            item = self.waiting.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, _Item):
            return self._sent(item)
        self.waiting.put(item)  # the end, or an error: for `next`; nothing comes behind it
        return None

    def next(self) -> _Item | None:
        """The next batch, waited for; None at the end."""
        item = self.waiting.get()
        if isinstance(item, BaseException):
            raise item
        return None if item is None else self._sent(item)

    def _sent(self, item: _Item) -> _Item:
        with _named(item.number):
            return self.lane.send(item)

    def _fetch(self) -> None:
        number = 0
        try:
            source = iter(self.loader)
            while not self.stopped.is_set():
                with _named(number):
                    try:
                        batch = next(source)
                    except StopIteration:
                        break
                    args, kwargs = self._arguments(batch)
                    args, kwargs = self.lane.pinned((args, kwargs))
                self._put(_Item(number, batch, args, kwargs))
                number += 1
        except BaseException as error:
            self._put(error)
        else:
            self._put(None)

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.inputs is None:
            return arguments(self.predict, batch)
        taken = self.inputs(batch)
        if isinstance(taken, tuple):
            return taken, {}
        return ((), taken) if isinstance(taken, dict) else ((taken,), {})

    def _put(self, entry: _Item | BaseException | None) -> None:
        while not self.stopped.is_set():
            try:
                self.waiting.put(entry, timeout=0.05)
                return
            except queue.Full:
                continue


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Errors inside say at which batch, counted from 0, they happened."""
    try:
        yield
    except FavourError as error:
        raise type(error)(f"batch {number}: {error}") from error
    except Exception as error:
        error.add_note(f"in batch {number} of the stream")
        raise


# ----------------------------------------------------------------------------------------------------------- device


def _device(predict: Propagator) -> torch.device:
    tensors = (*predict.store.parameters(), *predict.store.buffers())
    return next((t.device for t in tensors), torch.device("cpu"))


def _copied(predict: Propagator, device: torch.device) -> Propagator:
    """A predictor of the same with tensors of its own on another device; the given one stays where it is."""
    twin = type(predict)(predict.program.clone(device=device))
    twin.prepare()
    return twin
