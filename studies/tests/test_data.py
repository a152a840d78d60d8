"""Data sets from a local folder: made here in the layout of the real ones."""

import json
from pathlib import Path

import pytest
import torch

import favour
from favour_studies.experiments.data import images, scaled, uci


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "uci").mkdir()
    rows = "\n".join(f"{i},{2 * i},{3 * i}" for i in range(10))
    (tmp_path / "uci" / "boston.csv").write_text("x1,x2,y\n" + rows + "\n")
    (tmp_path / "uci" / "boston_test_splits.json").write_text(json.dumps([[0, 3], [1, 2]]))
    return tmp_path


def test_uci_splits_rows(folder: Path) -> None:
    train, test = uci("boston", 1, folder)
    assert len(train) == 8 and train.x.shape == (8, 2)
    torch.testing.assert_close(test.y, torch.tensor([3.0, 6.0]))


@pytest.mark.parametrize(("name", "split"), [("nowhere", 0), ("energy", 0), ("boston", 7)])
def test_uci_bad(folder: Path, name: str, split: int) -> None:
    with pytest.raises(favour.FavourError, match=name if name != "boston" else "cannot read"):
        uci(name, split, folder)


def test_uci_corrupt(folder: Path) -> None:
    (folder / "uci" / "boston.csv").write_text("x1,x2,y\n1,2,oops\n")
    with pytest.raises(favour.errors.CorruptFile, match="boston"):
        uci("boston", 0, folder)


def test_images_unknown_or_missing(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(favour.FavourError, match="imagenet"):
        images("imagenet", "test", tmp_path)
    with pytest.raises(favour.FavourError, match="ylecun/mnist"):
        images("mnist", "test", tmp_path)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "test-00000-of-00001.parquet").write_bytes(b"not a table")
    with pytest.raises(favour.errors.CorruptFile, match="mnist"):
        images("mnist", "test", tmp_path)


def test_embedded_sets_need_nothing() -> None:
    train, test = images("digits", "train"), images("digits", "test")
    assert train.x.shape == (1257, 1, 28, 28) and test.x.shape == (540, 1, 28, 28)
    assert train.x.dtype == torch.uint8 and int(train.x.max()) == 255 and set(test.y.tolist()) == set(range(10))
    fit, held = uci("diabetes", 0, "embedded")
    assert len(fit) == 398 and len(held) == 44
    other = uci("diabetes", 1, "embedded")[1]
    assert not torch.equal(held.y, other.y)


def test_scaled_ranges() -> None:
    grey, colour = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1), torch.zeros(1, 3, 1, 1).byte()
    assert scaled(grey).flatten().tolist() == [0.0, 1.0]
    assert scaled(colour).flatten().tolist() == [-1.0] * 3


def test_uci_is_not_on_the_hub() -> None:
    with pytest.raises(favour.FavourError, match="folder"):
        uci("boston", 0, "hub")
