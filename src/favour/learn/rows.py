"""The rows a fit trains on, and those it holds out.

    a pair of tensors           rows are drawn by seed, batches are made here
    a DataLoader                of a data set with a length and an ordinary sampler: rows of the data set, by seed
    a list of batches           the last rows of every batch
    any other iterable          rows cannot be told apart between epochs, so held-out rows must be given: `validation=`

Nothing that is held out is ever trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from favour.errors import InvalidType, InvalidValue, ShapeMismatch

Batch = tuple[Any, Tensor]  # inputs (a tensor, a tuple of arguments or a dict) and targets


@dataclass(frozen=True)
class Rows:
    """Rows to train on and rows held out.

    Attributes:
        batches: A function that begins an epoch; shuffles by torch's global random numbers.
        count: Rows to train on, N.
        steps: Batches in an epoch.
        held: Batches held out; may be empty.
    """

    batches: Callable[[], Iterable[Batch]]
    count: int
    steps: int
    held: list[Batch]


def rows_of(loader: Any, validation: Any, batch_size: int, seed: int) -> Rows:
    """Split what a user gives.

    Args:
        loader: See the module.
        validation: A share in [0, 1), or a loader or pair of its own.
        batch_size: For a pair of tensors.
        seed: Of the split.
    """
    share = 0.0
    held: list[Batch] = []
    if isinstance(validation, int | float):
        share = float(validation)
        if not 0 <= share < 1:
            raise InvalidValue(f"`validation` is {validation}; give a share from 0 to below 1, or a loader.")
    else:
        held = list(_checked(_batches(validation, 1024), "validation"))
        if not held:
            raise InvalidValue("`validation` is empty.")
    if _is_pair(loader):
        return _of_pair(loader, share, held, batch_size, seed)
    if isinstance(loader, tuple):
        kinds = ", ".join(type(part).__name__ for part in loader)
        raise InvalidType(f"`loader` is a tuple of {kinds}; one pair is of tensors: `torch.as_tensor` makes them.")
    if isinstance(loader, DataLoader) and share:
        return _of_dataset(loader, share, seed)
    if isinstance(loader, list) and share:
        return _of_list(loader, share)
    if share and not isinstance(loader, Iterable):
        raise InvalidType(f"`loader` is a {type(loader).__name__}; give (inputs, targets), or a loader of such pairs.")
    if share:
        raise InvalidValue(
            f"the rows of a {type(loader).__name__} cannot be told apart between epochs, so none can be held out. Give "
            "`validation=` a loader of its own, or 0 to hold out none."
        )
    count, steps = 0, 0
    for x, _ in _checked(loader, "loader"):
        count, steps = count + size_of(x), steps + 1
    if not steps:
        raise InvalidValue("`loader` is empty (or an iterator that was used up): a loader is iterated once an epoch.")
    return Rows(lambda: _checked(loader, "loader"), count, steps, held)


def _of_pair(pair: tuple[Any, Tensor], share: float, held: list[Batch], batch_size: int, seed: int) -> Rows:
    x, y = pair
    n = size_of(x)
    if len(y) != n:
        raise ShapeMismatch(f"{n} inputs and {len(y)} targets; there must be as many of both.")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    cut = round(share * n)
    if n - cut < 1 or (share and not cut):
        raise InvalidValue(f"{n} rows are too few to hold out a share of {share} and train on the others.")
    test, train = order[:cut], order[cut:]
    held = held or [_taken(x, y, part) for part in test.split(1024) if len(part)]

    def batches() -> Iterator[Batch]:
        for part in train[torch.randperm(len(train))].split(batch_size):
            yield _taken(x, y, part)

    check_finite(pair, "loader", 0)
    return Rows(batches, len(train), -(-len(train) // batch_size), held)


def _of_dataset(loader: DataLoader[Any], share: float, seed: int) -> Rows:
    data: Any = loader.dataset
    plain = type(loader.sampler) in (RandomSampler, SequentialSampler) and loader.batch_size is not None
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not plain:
        raise InvalidValue(
            "rows can be held out of a DataLoader of a data set with a length and an ordinary sampler; this one has "
            f"{type(data).__name__} and {type(loader.sampler).__name__}. Give `validation=` a loader of its own."
        )
    n = len(data)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    cut = round(share * n)
    if not n:
        raise InvalidValue("`loader` is empty.")
    if n - cut < 1 or not cut:
        raise InvalidValue(f"{n} rows are too few to hold out a share of {share} and train on the others.")
    common: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }
    shuffle = isinstance(loader.sampler, RandomSampler)
    made: DataLoader[Any] = DataLoader(
        Subset(data, sorted(order[cut:])), shuffle=shuffle, drop_last=loader.drop_last, **common
    )
    held = list(_checked(DataLoader(Subset(data, sorted(order[:cut])), **common), "loader"))
    return Rows(lambda: _checked(made, "loader"), n - cut, len(made), held)


def _of_list(loader: list[Any], share: float) -> Rows:
    train, held = [], []
    for x, y in _checked(loader, "loader"):
        n = size_of(x)
        cut = round(share * n)
        train.append(_taken(x, y, torch.arange(n - cut)))
        if cut:
            held.append(_taken(x, y, torch.arange(n - cut, n)))
    if not train:
        raise InvalidValue("`loader` is empty.")
    if not held:
        raise InvalidValue(f"batches of such few rows leave none to hold out at `validation={share}`.")

    def batches() -> Iterator[Batch]:
        for i in torch.randperm(len(train)).tolist():
            yield train[i]

    return Rows(batches, sum(size_of(x) for x, _ in train), len(train), held)


def size_of(x: Any) -> int:
    """Rows of the inputs of a batch."""
    first = next((t for t in pytree.tree_leaves(x) if isinstance(t, Tensor) and t.dim()), None)
    if first is None:
        raise InvalidType(f"inputs are a {type(x).__name__} without tensors; give a tensor, a tuple or a dict of them.")
    return len(first)


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    x, y = batch
    return pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, x), y.to(device)


def _is_pair(loader: Any) -> bool:
    if not isinstance(loader, tuple) or len(loader) != 2 or not isinstance(loader[1], Tensor):
        return False
    return isinstance(loader[0], Tensor | dict | tuple)


def _taken(x: Any, y: Tensor, rows: Tensor) -> Batch:
    return pytree.tree_map(lambda t: t[rows.to(t.device)] if isinstance(t, Tensor) else t, x), y[rows.to(y.device)]


def _batches(loader: Any, batch_size: int) -> Iterable[Any]:
    if _is_pair(loader):
        x, y = loader
        return (_taken(x, y, part) for part in torch.arange(size_of(x)).split(batch_size))
    return loader


def _checked(loader: Iterable[Any], name: str) -> Iterator[Batch]:
    """Pairs, with numbers that are finite and targets as many as inputs."""
    for index, batch in enumerate(loader):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InvalidType(
                f"`{name}` gave a {type(batch).__name__} as batch {index}; pairs (inputs, targets) are required."
            )
        x, y = batch
        x, y = tuple(x) if isinstance(x, list) else x, torch.as_tensor(y)
        if len(y) != size_of(x):
            raise ShapeMismatch(f"batch {index} of `{name}` has {size_of(x)} inputs and {len(y)} targets.")
        check_finite((x, y), name, index)
        if len(y):
            yield x, y


def check_finite(batch: Batch, name: str, index: int) -> None:
    """Raise for NaN and infinity."""
    for what, value in zip(("inputs", "targets"), batch, strict=True):
        for t in pytree.tree_leaves(value):
            if isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isfinite().all()):
                row = (
                    int((~t.isfinite()).flatten(1).any(1).nonzero()[0])
                    if t.dim() > 1
                    else int((~t.isfinite()).nonzero()[0])
                )
                raise InvalidValue(f"{what} of batch {index} of `{name}` hold NaN or infinity, first in row {row}.")
