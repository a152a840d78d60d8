"""Rating: rows in, rows out, none lost and none twice."""

import csv
import io
import json
import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import favour
import favour.cli
from favour.errors import CorruptFile, InvalidValue, UnsupportedOperation
from favour.exporting import export
from favour.rating import batching, job, loop, models, rate, reading, sources, store

FEATURES = 4


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, outputs)).eval()


@pytest.fixture(scope="module")
def classifier():
    return favour.compile(network(3), torch.zeros(2, FEATURES))


@pytest.fixture(scope="module")
def regressor():
    return favour.compile(network(1), torch.zeros(2, FEATURES))


def rows(n: int = 50) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, FEATURES)).astype(np.float32)


def write_parquet(path, x, **options):
    columns = {f"f{i}": x[:, i] for i in range(x.shape[1])}
    pq.write_table(pa.table({"key": pa.array(range(len(x)), pa.int32()), **columns}), path, **options)
    return path


def expected(predict, x) -> dict[str, np.ndarray]:
    """What one call for all rows says, scores by their definitions."""
    with torch.no_grad():
        belief, p = predict(torch.from_numpy(x)), predict.probabilities(torch.from_numpy(x)).numpy()
    top = p.argmax(1)
    every = np.arange(len(x))
    with torch.no_grad():
        jsd = predict.jsd(torch.from_numpy(x)).numpy()
    covariance = belief.covariance_matrix.numpy()
    return {
        "prediction": top,
        "probability": p[every, top],
        "stddev": np.sqrt(covariance[every, top, top]),
        "jsd": jsd,
        "entropy": -(p * np.log(p)).sum(1),
        "max_probability": p.max(1),
        "least_confidence": 1 - p.max(1),
    }


def check_values(table, wanted, index=None) -> None:
    for name, values in wanted.items():
        values = values if index is None else values[index]
        np.testing.assert_allclose(table[name].to_numpy(), values, rtol=2e-4, atol=1e-6, err_msg=name)


# ---- tables


def test_parquet_columns_are_the_predictions_of_its_rows(tmp_path, classifier):
    x = rows(50)
    data = write_parquet(tmp_path / "x.parquet", x, row_group_size=7)
    done = rate(data, classifier, tmp_path / "out.parquet", id="key", batch_size=5, part_rows=16)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["source", "row", "id", *expected(classifier, x[:1])]
    assert table["row"].to_pylist() == table["id"].to_pylist() == list(range(50))
    assert table.schema.field("id").type == pa.int32() and table.schema.field("jsd").type == pa.float32()
    assert set(table["source"].to_pylist()) == {str(data)}
    assert (done.rows, done.bad, done.resumed, done.bad_out) == (50, 0, 0, None)
    assert done.columns == ("f0", "f1", "f2", "f3")
    check_values(table, expected(classifier, x))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.parquet", "x.parquet"]


def test_every_class_has_a_column_on_request(tmp_path, classifier):
    data = write_parquet(tmp_path / "x.parquet", rows(3))
    rate(data, classifier, tmp_path / "out.parquet", id="key", every_class=True)
    table = pq.read_table(tmp_path / "out.parquet")
    p = np.stack([table[f"probability_{k}"].to_numpy() for k in range(3)])
    np.testing.assert_allclose(p.sum(0), 1, rtol=1e-5)
    np.testing.assert_allclose(p.max(0), table["probability"].to_numpy())


def test_columns_may_be_chosen_and_ordered(tmp_path, classifier):
    x = rows(6)
    data = tmp_path / "x.parquet"
    names = ["d", "c", "b", "a"]
    pq.write_table(
        pa.table({**{n: x[:, 3 - i].astype(np.float64) for i, n in enumerate(names)}, "extra": [1] * 6}), data
    )
    rate(data, classifier, tmp_path / "out.parquet", columns=["a", "b", "c", "d"])
    check_values(pq.read_table(tmp_path / "out.parquet"), expected(classifier, x))


def test_bad_rows_of_parquet_are_listed(tmp_path, classifier):
    x = rows(8)
    x[2, 1], x[5, 3] = np.nan, -np.inf
    table = pa.table({f"f{i}": x[:, i] for i in range(4)})
    values = table["f0"].to_pylist()
    values[4] = None
    big = pa.array([1e300 if i == 6 else float(v) for i, v in enumerate(x[:, 2])], pa.float64())
    table = table.set_column(0, "f0", pa.array(values, pa.float32())).set_column(2, "f2", big)
    pq.write_table(table, tmp_path / "x.parquet")
    done = rate(tmp_path / "x.parquet", classifier, tmp_path / "out.parquet", batch_size=3)
    bad = pq.read_table(tmp_path / "out.bad.parquet").to_pylist()
    assert (done.rows, done.bad, done.bad_out) == (4, 4, str(tmp_path / "out.bad.parquet"))
    assert [b["row"] for b in bad] == [2, 4, 5, 6]
    assert [b["reason"].split("`")[1] for b in bad] == ["f1", "f0", "f3", "f2"]
    assert "missing" in bad[1]["reason"] and "inf" in bad[2]["reason"] and "1e+300" in bad[3]["reason"]
    assert json.loads(bad[1]["content"])["f0"] is None
    good = pq.read_table(tmp_path / "out.parquet")
    assert good["row"].to_pylist() == [0, 1, 3, 7]
    check_values(good, expected(classifier, x[[0, 1, 3, 7]]))


def test_lists_of_numbers_are_rows(tmp_path, classifier):
    x = rows(5)
    lists = [r.tolist() for r in x]
    lists[1], lists[3] = lists[1][:2], None
    pq.write_table(
        pa.table({"id": list("abcde"), "v": pa.array(lists, pa.list_(pa.float32()))}), tmp_path / "x.parquet"
    )
    rate(tmp_path / "x.parquet", classifier, tmp_path / "out.parquet", id="id")
    good, bad = (pq.read_table(tmp_path / f"out{s}.parquet") for s in ("", ".bad"))
    assert good["id"].to_pylist() == ["a", "c", "e"] and bad["id"].to_pylist() == ["b", "d"]
    assert bad["reason"].to_pylist() == ["column `v` holds 2 values instead of 4", "column `v` is missing"]
    check_values(good, expected(classifier, x[[0, 2, 4]]))


CSV = """name,f0,f1,f2,f3
ada,1,2,3,4
"bob, the ""builder""\nof lines",0.5,-1e-1,2,3

cid,oops,2,3,4
dot,1,2,3
eve,1,,3,4
fay,1,2,nan,4
gus,1,2,3,4,5
hal, 4 ,3,2,1
ian,1_0,3,2,1
joe,inf,3,2,1
"""


def test_csv_rows_are_rated_or_reported(tmp_path, classifier):
    (tmp_path / "x.csv").write_text(CSV)
    done = rate(tmp_path / "x.csv", classifier, tmp_path / "out.parquet", id="name", batch_size=2)
    good, bad = (pq.read_table(tmp_path / f"out{s}.parquet") for s in ("", ".bad"))
    assert done.columns == ("f0", "f1", "f2", "f3")
    assert good["id"].to_pylist() == ["ada", 'bob, the "builder"\nof lines', "hal"]
    assert good["row"].to_pylist() == [0, 1, 7]
    x = np.array([[1, 2, 3, 4], [0.5, -0.1, 2, 3], [4, 3, 2, 1]], np.float32)
    check_values(good, expected(classifier, x))
    assert bad["row"].to_pylist() == [2, 3, 4, 5, 6, 8, 9]
    assert bad["id"].to_pylist() == ["cid", "dot", "eve", "fay", "gus", "ian", "joe"]
    reasons = bad["reason"].to_pylist()
    assert reasons[0] == "column `f0` is no number: 'oops'"
    assert reasons[1] == "4 fields instead of 5" and reasons[4] == "6 fields instead of 5"
    assert bad["content"].to_pylist()[4] == "gus,1,2,3,4,5"


def test_clean_csv_takes_the_fast_way_to_the_same_numbers(tmp_path, classifier, monkeypatch):
    x = rows(40)
    text = "a,b,c,d\r\n" + "".join(",".join(repr(float(v)) for v in r) + "\r\n" for r in x)
    (tmp_path / "x.csv").write_bytes(text.encode())
    slow = reading._one_by_one
    monkeypatch.setattr(reading, "_one_by_one", lambda *a: pytest.fail("the slow way"))
    rate(tmp_path / "x.csv", classifier, tmp_path / "fast.parquet", batch_size=7, part_rows=10)

    def refuse(*arguments, **options):
        raise pa.ArrowInvalid("no")

    monkeypatch.setattr(reading, "_one_by_one", slow)
    monkeypatch.setattr("pyarrow.csv.read_csv", refuse)
    rate(tmp_path / "x.csv", classifier, tmp_path / "slow.parquet", batch_size=7, part_rows=10)
    fast, slow_table = (pq.read_table(tmp_path / f"{n}.parquet") for n in ("fast", "slow"))
    assert fast.equals(slow_table) and fast.num_rows == 40
    check_values(fast, expected(classifier, x))


def test_csv_without_names_and_tsv(tmp_path, classifier):
    x = rows(5)
    (tmp_path / "x.tsv").write_text("".join("\t".join(map(repr, r.tolist())) + "\n" for r in x))
    rate(
        tmp_path / "x.tsv",
        classifier,
        tmp_path / "out.parquet",
        columns=["column_0", "column_1", "column_2", "column_3"],
    )
    check_values(pq.read_table(tmp_path / "out.parquet"), expected(classifier, x))


FIELD = st.text(st.sampled_from('ab," \n\r1.é'), max_size=5)


@given(st.lists(st.lists(FIELD, min_size=2, max_size=3), min_size=1, max_size=12), st.booleans(), st.integers(1, 4))
def test_records_of_a_csv_are_found_where_a_reader_finds_them(tmp_path_factory, records, ended, size):
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerows([["x", "y"], *records])
    text = stream.getvalue() + ("\n\n" if ended else "")
    file = tmp_path_factory.getbasetemp() / "records.csv"
    file.write_bytes(text.encode())
    found = list(sources._records(str(file), size, ()))
    wanted = [r for r in csv.reader(io.StringIO(text, newline="")) if r][1:]
    read = []
    for unit in found:
        part = file.read_bytes()[unit.first : unit.last].decode()
        read += [r for r in csv.reader(io.StringIO(part, newline="")) if r]
        assert unit.start + unit.rows == len(read)
        assert unit.rows <= size
    assert read == wanted


def test_lines_split_between_blocks_are_found(tmp_path, monkeypatch):
    text = "x\r\n1\r\n\r\n22\n\n3\r\n7\n5"
    (tmp_path / "x.csv").write_bytes(text.encode())
    wanted = list(sources._line_ends(str(tmp_path / "x.csv")))
    pieces = np.split(np.frombuffer(text.encode(), np.uint8), wanted)
    assert [bytes(p).strip() for p in pieces[:-1]] == [b"x", b"1", b"22", b"3", b"7", b"5"]
    for block in range(1, 9):
        monkeypatch.setattr(sources, "_BLOCK", block)
        assert list(sources._line_ends(str(tmp_path / "x.csv"))) == wanted


# ---- arrays and images


def test_npy_rows_keep_their_numbers(tmp_path, classifier):
    x = rows(20)
    x[[3, 11], 0] = np.nan
    np.save(tmp_path / "x.npy", x.reshape(20, 2, 2).astype(np.float64))
    rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet", batch_size=6, part_rows=9)
    good = pq.read_table(tmp_path / "out.parquet")
    kept = [i for i in range(20) if i not in (3, 11)]
    assert good["row"].to_pylist() == kept
    assert pq.read_table(tmp_path / "out.bad.parquet")["row"].to_pylist() == [3, 11]
    check_values(good, expected(classifier, x[kept]))


def test_pickled_arrays_are_refused(tmp_path, classifier):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(CorruptFile, match="no NPY file of numbers"):
        rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet")


class Pixels(nn.Module):
    """Says what it sees: the mean of each channel, all but without noise."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out = nn.Linear(channels, channels, bias=False)
        self.out.weight.data.copy_(torch.eye(channels))

    def forward(self, x):
        return self.out(nn.functional.dropout(x.mean((2, 3)), 0.1, True))


def test_images_are_decoded_resized_and_normalised(tmp_path):
    folder = tmp_path / "images"
    (folder / "deeper").mkdir(parents=True)
    colours = {"a.png": (255, 0, 51), "deeper/b.bmp": (0, 102, 255), "c.png": (0, 0, 0)}
    for name, colour in colours.items():
        Image.new("RGB", (9, 5), colour).save(folder / name)
    whole = (folder / "a.png").read_bytes()
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    (folder / "notes.txt").write_text("not an image")
    settings = {"size": (4, 6), "mean": (0.5, 0.25, 0.0), "std": (0.5, 1.0, 2.0), "kind": "regression"}
    done = rate(folder, Pixels(3), tmp_path / "out.parquet", id="name", batch_size=2, **settings)
    good, bad = (pq.read_table(tmp_path / f"out{s}.parquet") for s in ("", ".bad"))
    assert (done.rows, done.bad) == (3, 1)
    assert bad["source"].to_pylist() == [str(folder / "half.png")]
    assert bad["reason"].to_pylist()[0].startswith("cannot be decoded")
    assert good["id"].to_pylist() == ["a", "c", "b"]
    pixel = np.array([colours["a.png"], colours["c.png"], colours["deeper/b.bmp"]]) / 255
    wanted = (pixel - [0.5, 0.25, 0.0]) / [0.5, 1.0, 2.0]
    for k in range(3):
        np.testing.assert_allclose(good[f"prediction_{k}"].to_numpy(), wanted[:, k], atol=1e-6)


def test_grey_images_of_sixteen_bits_keep_them(tmp_path):
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(tmp_path / "x.png")
    rate(tmp_path / "x.png", Pixels(1), tmp_path / "out.parquet", size=(4, 4), channels=1, kind="regression")
    found = pq.read_table(tmp_path / "out.parquet")["prediction"][0].as_py()
    assert found == pytest.approx(300 / 65535, rel=1e-4)


# ---- kinds


def test_regression_has_intervals(tmp_path, regressor):
    x = rows(9)
    np.save(tmp_path / "x.npy", x)
    rate(tmp_path / "x.npy", regressor, tmp_path / "out.parquet", level=0.9)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["source", "row", "prediction", "stddev", "low", "high"]
    with torch.no_grad():
        belief = regressor(torch.from_numpy(x))
    mean, deviation = belief.mean[:, 0].numpy(), belief.stddev[:, 0].numpy()
    z = 1.6448536269514722
    check_values(table, {"prediction": mean, "low": mean - z * deviation, "high": mean + z * deviation})


@pytest.mark.parametrize("kind", ["binary", "ordinal", "multilabel"])
def test_other_classifiers(tmp_path, classifier, regressor, kind):
    predict = regressor if kind == "binary" else classifier
    x = rows(7)
    np.save(tmp_path / "x.npy", x)
    rate(tmp_path / "x.npy", predict, tmp_path / "out.parquet", kind=kind)
    table = pq.read_table(tmp_path / "out.parquet")
    p = predict.probabilities(torch.from_numpy(x), kind=kind).detach().numpy()
    if kind == "multilabel":
        for k in range(3):
            check_values(table, {f"probability_{k}": p[:, k], f"prediction_{k}": p[:, k] >= 0.5})
    else:
        check_values(table, {"prediction": p.argmax(1), "probability": p.max(1), "max_probability": p.max(1)})
        check_values(table, {"least_confidence": 1 - p.max(1)})
    assert ("jsd" in table.column_names) == (kind == "binary")
    if kind == "binary":  # of the pair (0, z)
        with torch.no_grad():
            check_values(table, {"jsd": predict.jsd(torch.from_numpy(x), kind="binary").numpy()})


# ---- models


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "made_up_models.py").write_text(
        "import torch\nfrom torch import nn\nimport test_rate\n"
        "def plain(): return test_rate.network(3)\n"
        "def fresh(): return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 3))\n"
        "def bayes():\n    net = nn.Sequential(nn.Linear(4, 2))\n"
        "    return net, {'0.weight': torch.full((2, 4), .25), '0.bias': torch.full((2,), .5)}\n"
        "number = lambda: 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_factories_with_weights_and_posteriors(tmp_path, factories, classifier):
    x = rows(5)
    np.save(tmp_path / "x.npy", x)
    save_file(network(3).state_dict(), tmp_path / "w.safetensors")
    rate(tmp_path / "x.npy", "made_up_models:fresh", tmp_path / "a.parquet", weights=tmp_path / "w.safetensors")
    check_values(pq.read_table(tmp_path / "a.parquet"), expected(classifier, x))
    rate(tmp_path / "x.npy", "made_up_models:bayes", tmp_path / "b.parquet", kind="regression")
    variance = 0.25 * (x.astype(np.float64) ** 2).sum(1) + 0.5
    check_values(pq.read_table(tmp_path / "b.parquet"), {"stddev_0": np.sqrt(variance), "stddev_1": np.sqrt(variance)})


def test_models_that_do_not_fit_are_refused(tmp_path, factories, classifier):
    np.save(tmp_path / "x.npy", rows(2))
    out = tmp_path / "out.parquet"
    save_file(network(2).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(favour.errors.ShapeMismatch, match=r"3.weight \(2, 16\) for \(3, 16\)"):
        rate(tmp_path / "x.npy", "made_up_models:fresh", out, weights=tmp_path / "w.safetensors")
    with pytest.raises(favour.errors.UnknownName, match="has no `nothing`"):
        rate(tmp_path / "x.npy", "made_up_models:nothing", out)
    with pytest.raises(TypeError, match="returned a int"):
        rate(tmp_path / "x.npy", "made_up_models:number", out)
    with pytest.raises(InvalidValue, match=r"no model at `nowhere\.pt`"):
        rate(tmp_path / "x.npy", "nowhere.pt", out)
    with pytest.raises(InvalidValue, match="`kind` is 'tree'"):
        rate(tmp_path / "x.npy", classifier, out, kind="tree")
    np.save(tmp_path / "wide.npy", np.zeros((3, 5)))
    with pytest.raises(InvalidValue, match=r"inputs of shape \(4,\) and a row of the data has \(5,\)"):
        rate(tmp_path / "wide.npy", classifier, out)
    two = favour.compile(_Two(), (torch.zeros(2, 4), torch.zeros(2, 4)))
    with pytest.raises(UnsupportedOperation, match="2 tensor inputs"):
        rate(tmp_path / "x.npy", two, out)
    assert not out.exists() and not (tmp_path / "out.parquet.parts").exists()


class _Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.line = nn.Dropout(0.1), nn.Linear(4, 2)

    def forward(self, a, b):
        return self.line(self.drop(a + b))


def test_saved_predictor(tmp_path, classifier):
    x = rows(5)
    np.save(tmp_path / "x.npy", x)
    classifier.save(tmp_path / "model.favour")
    rate(tmp_path / "x.npy", tmp_path / "model.favour", tmp_path / "out.parquet")
    check_values(pq.read_table(tmp_path / "out.parquet"), expected(classifier, x))


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
@pytest.mark.filterwarnings("ignore")
def test_exported_models(tmp_path, classifier, suffix):
    x = rows(9)
    np.save(tmp_path / "x.npy", x)
    export(classifier, tmp_path / f"model.{suffix}")
    rate(tmp_path / "x.npy", tmp_path / f"model.{suffix}", tmp_path / "out.parquet", batch_size=4)
    check_values(pq.read_table(tmp_path / "out.parquet"), expected(classifier, x))
    packed = models.open_model(tmp_path / f"model.{suffix}").packed
    again = models.unpack(packed)
    assert again.kind == "softmax" and again.shape == (FEATURES,)


# ---- stopping and going on


def test_interrupted_run_continues(tmp_path, classifier, monkeypatch):
    x = rows(60)
    x[[7, 33]] = np.nan
    np.save(tmp_path / "x.npy", x)
    settings = {"batch_size": 4, "part_rows": 10}
    rate(tmp_path / "x.npy", classifier, tmp_path / "whole.parquet", **settings)

    def stop(done: int, bad: int, total: int) -> None:
        assert total == 60
        if done + bad > 34:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet", progress=stop, **settings)
    assert not (tmp_path / "out.parquet").exists()
    parts = sorted(p.name for p in (tmp_path / "out.parquet.parts").glob("*"))
    assert parts == ["_bad", "_manifest.json", "part-000000.parquet", "part-000001.parquet", "part-000002.parquet"]
    carried = []
    original = job.Plan.rate
    monkeypatch.setattr(job.Plan, "rate", lambda self, n, *rest: carried.append(n) or original(self, n, *rest))
    done = rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet", **settings)
    assert carried == [3, 4, 5]
    assert (done.rows, done.bad, done.resumed) == (58, 2, 30)
    for end in ("parquet", "bad.parquet"):
        assert pq.read_table(tmp_path / f"out.{end}").equals(pq.read_table(tmp_path / f"whole.{end}"))
    assert not (tmp_path / "out.parquet.parts").exists()
    again = rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet", **settings)
    assert carried == [3, 4, 5] and (again.rows, again.bad, again.resumed) == (58, 2, 60)


def test_interrupted_joining_is_done_again(tmp_path, classifier, monkeypatch):
    np.save(tmp_path / "x.npy", rows(10))

    def fail(*arguments):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "join", fail)
        with pytest.raises(OSError, match="disk full"):
            rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet", part_rows=5)
    done = rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet", part_rows=5)
    assert (done.rows, done.resumed) == (10, 10)
    assert pq.read_table(tmp_path / "out.parquet")["row"].to_pylist() == list(range(10))


def test_automatic_batch_is_kept_when_going_on(tmp_path, classifier, monkeypatch):
    np.save(tmp_path / "x.npy", rows(20))
    monkeypatch.setattr(loop, "fitting_batch", lambda *a: 3)

    def stop(done: int, bad: int, total: int) -> None:
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet", part_rows=5, progress=stop)
    monkeypatch.setattr(loop, "fitting_batch", lambda *a: pytest.fail("chosen anew"))
    assert rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet", part_rows=5).batch == 3


def test_other_arguments_are_refused_and_named(tmp_path, classifier, regressor):
    np.save(tmp_path / "x.npy", rows(10))
    out = tmp_path / "out.parquet"
    rate(tmp_path / "x.npy", classifier, out)
    with pytest.raises(InvalidValue, match=r"is a rating with other arguments; these changed: model\."):
        rate(tmp_path / "x.npy", regressor, out)
    with pytest.raises(InvalidValue, match=r"these changed: `every_class` \(was False, is True\)"):
        rate(tmp_path / "x.npy", classifier, out, every_class=True)
    np.save(tmp_path / "x.npy", rows(11))
    with pytest.raises(InvalidValue, match=r"these changed: data\."):
        rate(tmp_path / "x.npy", classifier, out)
    assert pq.read_metadata(out).num_rows == 10
    assert rate(tmp_path / "x.npy", classifier, out, overwrite=True).rows == 11


def test_weights_are_part_of_the_model(classifier):
    other = network(3)
    before = models.digest(other)
    assert before == models.digest(network(3))
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    assert models.digest(other) != before
    twin = favour.compile(network(3), torch.zeros(2, FEATURES))
    assert models.digest(twin) == models.digest(classifier)
    assert models.digest(favour.compile(other, torch.zeros(2, FEATURES))) != models.digest(classifier)


def test_other_files_are_not_overwritten(tmp_path, classifier):
    np.save(tmp_path / "x.npy", rows(3))
    out = tmp_path / "out.parquet"
    out.write_text("my thesis")
    with pytest.raises(InvalidValue, match="is no rating of ours"):
        rate(tmp_path / "x.npy", classifier, out)
    assert out.read_text() == "my thesis"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "thesis").write_text("mine")
    with pytest.raises(InvalidValue, match="folder of other things"):
        rate(tmp_path / "x.npy", classifier, folder, overwrite=True)
    assert (folder / "thesis").exists()


def test_two_runs_do_not_share_an_output(tmp_path, classifier):
    np.save(tmp_path / "x.npy", rows(3))
    with store.Store(tmp_path / "out.parquet").locked(), pytest.raises(InvalidValue, match="another process"):
        rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet")
    assert rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet").rows == 3


def test_folder_of_parts_is_a_data_set(tmp_path, classifier):
    x = rows(25)
    x[4] = np.inf
    for i in range(2):
        write_parquet(tmp_path / f"x{i}.parquet", x)
    done = rate(str(tmp_path / "x*.parquet"), classifier, tmp_path / "out", id="key", part_rows=10)
    table = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    kept = [i for i in range(25) if i != 4]
    assert table["row"].to_pylist() == kept * 2 and table["source"].to_pylist() == sorted(table["source"].to_pylist())
    assert pyarrow.dataset.dataset(tmp_path / "out" / "_bad", ignore_prefixes=["."]).count_rows() == done.bad == 2
    assert rate(str(tmp_path / "x*.parquet"), classifier, tmp_path / "out", id="key", part_rows=10).resumed == 50


# ---- rows that the model cannot rate


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.line = nn.Embedding(10, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.line(nn.functional.dropout(self.table(x).mean(1), 0.2, True))


def test_rows_that_the_model_fails_on_are_found(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 10, (30, 5))
    tokens[[8, 17, 18], 2] = 10
    text = "a,b,c,d,e\n" + "".join(",".join(map(str, r)) + "\n" for r in tokens)
    (tmp_path / "x.csv").write_text(text + "1,2,2.5,4,5\n")
    done = rate(tmp_path / "x.csv", Tokens(), tmp_path / "out.parquet", dtype="int64", batch_size=16)
    bad = pq.read_table(tmp_path / "out.bad.parquet").to_pylist()
    assert (done.rows, [b["row"] for b in bad]) == (27, [8, 30, 17, 18])
    assert bad[0]["reason"].startswith("the model fails: InvalidValue: the input asks for row 10 of a table")
    assert bad[1]["reason"] == "column `c` is no whole number: 2.5"
    fine = [i for i in range(30) if i not in (8, 17, 18)]
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["row"].to_pylist() == fine
    check_values(table, expected(favour.compile(Tokens(), torch.zeros(2, 5, dtype=torch.int64)), tokens[fine]))


def test_a_model_that_always_fails_is_an_error(tmp_path, classifier, monkeypatch):

    def broken(self, x):
        raise RuntimeError("out of order")

    monkeypatch.setattr(models.PredictorRater, "__call__", broken)
    plan = job.Plan(str(tmp_path / "o"), reading.Reading(shape=(4,)), 8, None)
    with pytest.raises(job.ModelFailed, match=r"none of 8 rows in a row can be rated: .*out of order"):
        plan.results(reading.Chunk(rows(8), ["x"] * 8, np.arange(8)), models.PredictorRater(classifier))


def test_data_without_a_row_is_refused(tmp_path, classifier):
    np.save(tmp_path / "x.npy", np.full((4, FEATURES), np.nan))
    with pytest.raises(InvalidValue, match="no row to rate: the first ones are bad"):
        rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet")
    np.save(tmp_path / "x.npy", np.zeros((0, FEATURES)))
    with pytest.raises(InvalidValue, match="there is no row to rate"):
        rate(tmp_path / "x.npy", classifier, tmp_path / "out.parquet")
    with pytest.raises(InvalidValue, match="no data at"):
        rate(tmp_path / "*.csv", classifier, tmp_path / "out.parquet")
    (tmp_path / "y.csv").write_text("a\n1\n")
    with pytest.raises(InvalidValue, match="mixes csv, npy"):
        rate([tmp_path / "x.npy", tmp_path / "y.csv"], classifier, tmp_path / "out.parquet")
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(CorruptFile, match="no Parquet file"):
        rate(tmp_path / "x.parquet", classifier, tmp_path / "out.parquet")


# ---- batches


def test_batches_are_never_larger_than_asked(tmp_path, classifier, monkeypatch):
    write_parquet(tmp_path / "x.parquet", rows(100), row_group_size=33)
    sizes = []
    original = models.PredictorRater.__call__
    monkeypatch.setattr(models.PredictorRater, "__call__", lambda self, x: sizes.append(len(x)) or original(self, x))
    rate(tmp_path / "x.parquet", classifier, tmp_path / "out.parquet", id="key", batch_size=10, part_rows=70)
    assert max(sizes) == 10 and sum(sizes) == 100 + loop.EXAMPLE


@pytest.mark.parametrize("per_row, fits", [(1, 1024), (2**20, 64), (2**40, 1)])
def test_batch_fits_the_memory(monkeypatch, per_row, fits):
    monkeypatch.setattr(batching, "free_memory", lambda device: 2 * 2**29)
    monkeypatch.setattr(batching, "_growth", lambda rate, x, device: len(x) * per_row)
    assert batching.fitting_batch(lambda x: None, np.zeros((2, 3)), processes=2) == fits


def test_growth_sees_what_a_batch_takes():
    # In a process of its own: what other tests left behind may be freed meanwhile.
    code = """if True:
        import numpy as np
        from favour.rating import batching

        def take(x):
            return np.ones((len(x), 2**20)).sum()  # 8 MiB for each row

        take(np.zeros((1, 1)))
        print(batching._growth(take, np.zeros((32, 1)), "cpu"))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.8 * 32 * 2**23 < int(done.stdout) < 2 * 32 * 2**23


# ---- the command


def command(*arguments) -> object:
    return CliRunner().invoke(favour.cli.build(), ["rate", *map(str, arguments)])


def test_command_writes_and_says_so(tmp_path, classifier):
    (tmp_path / "x.csv").write_text(CSV)
    classifier.save(tmp_path / "model.favour")
    data = (tmp_path / "model.favour", tmp_path / "x.csv", "--out", tmp_path / "out.parquet")
    result = command(*data, "--id", "name", "--columns", "f0,f1,f2,f3")
    assert result.exit_code == 0, result.output
    assert f"rated 3 rows into {tmp_path / 'out.parquet'}, 7 bad rows into" in result.output.replace("\n", "")
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 3


def test_command_passes_its_options_on(monkeypatch, tmp_path):
    given = {}

    def spy(data, model, out, **options):
        given.update(options, data=data, model=model, out=out)
        return "done"

    monkeypatch.setattr(favour.rating, "rate", spy)
    options = (
        "--size",
        "8,9",
        "--mean",
        ".5,.4,.3",
        "--std",
        "2",
        "--level",
        ".8",
        "--batch-size",
        "3",
        "--every-class",
    )
    result = command("m:f", "a", "b", "--out", tmp_path / "o", "--weights", "w", *options, "--overwrite")
    assert result.exit_code == 0, result.output
    assert (given["data"], given["model"], given["size"], given["std"]) == (["a", "b"], "m:f", (8, 9), (2.0,))
    assert given["mean"] == (0.5, 0.4, 0.3) and given["level"] == 0.8 and given["batch_size"] == 3
    assert given["overwrite"] and given["every_class"] and str(given["weights"]) == "w"
    assert "done" in result.output
    assert command("m:f", "a", "--out", "o", "--size", "8x9").exit_code == 2
    assert command("m:f", "a", "--out", "o", "--mean", "grey").exit_code == 2
    assert command("m:f", "a", "--out", "o", "--workers", "2").exit_code == 2


def test_command_interrupted_says_how_to_go_on(monkeypatch, tmp_path):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(favour.rating, "rate", stop)
    result = command("m:f", "a", "--out", tmp_path / "o")
    assert result.exit_code == 130 and "the same command continues" in result.output


def test_options_are_checked():
    for wrong in ({"batch_size": 0}, {"part_rows": 0}, {"level": 1.0}, {"std": (0.0,)}):
        with pytest.raises(InvalidValue):
            loop.Options(**wrong)
    assert math.isclose(loop.Options(level=0.5).level, 0.5)
