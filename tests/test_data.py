"""Data sets from a local folder: made here in the layout of the real ones."""

import json
from pathlib import Path

import pytest
import torch

import favour
from favour.experiments.data import images, uci


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
    with pytest.raises(favour.CorruptFile, match="boston"):
        uci("boston", 0, folder)


def test_images_unknown_or_missing(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(favour.FavourError, match="imagenet"):
        images("imagenet", "test", tmp_path)
    with pytest.raises(favour.FavourError, match="ylecun/mnist"):
        images("mnist", "test", tmp_path)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "test-00000-of-00001.parquet").write_bytes(b"not a table")
    with pytest.raises(favour.CorruptFile, match="mnist"):
        images("mnist", "test", tmp_path)
