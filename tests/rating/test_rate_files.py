"""Rating and the files around it: an earlier result stays whole, and files of others stay as they are."""

import csv
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from test_rate import FEATURES, command, network, rows, write_parquet

import favour
from favour.errors import FavourError, InvalidValue
from favour.rating import claims, lock, place, rate, store, writing

FORMS = ("out.parquet", "out.csv", "out.tsv", "out")


@pytest.fixture(scope="module")
def classifier():
    return favour.compile(network(3), torch.zeros(2, FEATURES))


@pytest.fixture(scope="module")
def other():
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)).eval()
    return favour.compile(net, torch.zeros(2, FEATURES))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "in").mkdir()
    return write_parquet(tmp_path / "in" / "x.parquet", rows(40), row_group_size=10)


SETTINGS = {"id": "key", "part_rows": 10, "batch_size": 10}


def snapshot(folder: Path) -> dict[str, str]:
    """Everything below a folder: names, kinds and contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        elif stat.S_ISREG(path.stat().st_mode):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "special"
    return found


def read(out: Path) -> pa.Table:
    """A result of any form."""
    if out.is_dir():
        return pyarrow.dataset.dataset(out).to_table()
    if out.suffix == ".parquet":
        return pq.read_table(out)
    return pacsv.read_csv(out, parse_options=pacsv.ParseOptions(delimiter="\t" if out.suffix == ".tsv" else ","))


def refused(tmp_path, *arguments, match: str, error=InvalidValue, **options) -> None:
    """A call that says why it does nothing, and does nothing."""
    before = snapshot(tmp_path)
    with pytest.raises(error, match=match) as found:
        rate(*arguments, **options)
    assert isinstance(found.value, FavourError)
    assert snapshot(tmp_path) == before


# ---- inputs


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("way", ["same", "relative", "link", "hard link", "linked folder", "of bad rows", "a part"])
def test_an_input_is_never_written(tmp_path, data, classifier, monkeypatch, way, overwrite):
    out: Path | str = data
    if way == "relative":
        monkeypatch.chdir(tmp_path)
        out = os.path.join("in", "..", "in", "x.parquet")
    elif way == "link":
        out = tmp_path / "y.parquet"
        out.symlink_to(data)
    elif way == "hard link":
        out = tmp_path / "y.parquet"
        os.link(data, out)
    elif way == "linked folder":
        (tmp_path / "other").symlink_to(tmp_path / "in")
        out = tmp_path / "other" / "x.parquet"
    elif way == "of bad rows":
        data = data.rename(tmp_path / "in" / "y.bad.parquet")
        out = tmp_path / "in" / "y.parquet"
    elif way == "a part":
        (tmp_path / "y.parquet.parts").mkdir()
        data = data.rename(tmp_path / "y.parquet.parts" / "part-000000.parquet")
        out = tmp_path / "y.parquet"
    refused(tmp_path, data, classifier, out, match="which this rating writes", overwrite=overwrite, id="key")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "given, out",
    [
        ("in", "in/y.parquet"),
        ("in", "in/deep/y.csv"),
        ("in", "in/rated"),
        (".", "y.parquet"),
        ("in/*.parquet", "in/y.parquet"),
        ("in/../in/*.p*", "in/y.pq"),
        ("**/*.parquet", "deep/er/y.parquet"),
        ("in/*", "in/rated"),
        ("*.parquet", "../in/y.parquet"),
        ("?.parque?", "y.parquet"),
        ("x[.]*", "x.csv"),
        ("*/x*", "in/xrated"),
        ("*.bad.parquet", "y.parquet"),
    ],
)
def test_no_result_where_the_data_are_looked_for(tmp_path, data, classifier, monkeypatch, given, out, overwrite):
    shutil.copy(data, tmp_path / "in" / "x.bad.parquet")
    beside = "**" not in given and "in/" not in given and given not in ("in", ".", "*/x*")
    monkeypatch.chdir(tmp_path / "in" if beside else tmp_path)
    refused(tmp_path, given, classifier, out, match="is looked for", overwrite=overwrite, id="key")


def test_results_elsewhere_are_written(tmp_path, data, classifier, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, out in (("in", "y.parquet"), ("in/*.parquet", "in2/y.parquet"), ("in/x*.parquet", "in/y.parquet")):
        assert rate(given, classifier, out, id="key").rows == 40
    assert not place._found("/d/*", "/d/.hidden") and not place._found("/d/**/x", "/d/.git/x")


def test_data_given_twice_are_refused(tmp_path, data, classifier):
    refused(tmp_path, [data, str(data.parent / "*")], classifier, tmp_path / "y.parquet", match="twice", id="key")
    (tmp_path / "in" / "z.parquet").symlink_to("nowhere")
    refused(tmp_path, data.parent, classifier, tmp_path / "y.parquet", match="broken link", id="key")


# ---- results


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mistake", ["model", "data", "columns", "id", "kind", "shape", "weights", "damaged"])
def test_mistakes_leave_the_earlier_result(tmp_path, data, classifier, form, mistake):
    out = tmp_path / form
    rate(data, classifier, out, **SETTINGS)
    model, given, options = classifier, data, {"id": "key"}
    if mistake == "model":
        model = str(tmp_path / "mistyped.onnx")
    elif mistake == "data":
        given = tmp_path / "nothing*.parquet"
    elif mistake == "columns":
        options["columns"] = ["f0", "f9"]
    elif mistake == "id":
        options["id"] = "name"
    elif mistake == "kind":
        options["kind"] = "tree"
    elif mistake == "shape":
        options["columns"] = ["f0", "f1"]
    elif mistake == "weights":
        model, options["weights"] = "test_rate:network", tmp_path / "no.safetensors"
    elif mistake == "damaged":
        given = tmp_path / "damaged.parquet"
        given.write_bytes(data.read_bytes()[:-20])
    refused(tmp_path, given, model, out, match=".", error=FavourError, overwrite=True, **options)


@pytest.mark.parametrize("form", FORMS)
def test_an_earlier_result_is_replaced_when_the_new_one_is_whole(tmp_path, data, classifier, other, form):
    out = tmp_path / form
    x = rows(40)
    x[3] = np.nan
    worse = write_parquet(tmp_path / "in" / "worse.parquet", x, row_group_size=10)
    rate(worse, classifier, out, **SETTINGS)
    before, seen = snapshot(tmp_path), []

    def look(*counts: int) -> None:
        seen.append({k: v for k, v in snapshot(tmp_path).items() if k in before})

    with pytest.raises(InvalidValue, match=r"these changed: model, data\."):
        rate(data, other, out, **SETTINGS)
    assert snapshot(tmp_path) == before
    done = rate(data, other, out, overwrite=True, progress=look, **SETTINGS)
    assert len(seen) == 5 and all(s == before for s in seen)
    assert (done.rows, done.bad, done.bad_out) == (40, 0, None)
    rate(data, other, tmp_path / "again.parquet", **SETTINGS)
    got, wanted = read(out), pq.read_table(tmp_path / "again.parquet")
    np.testing.assert_array_equal(got["prediction"].to_numpy(), wanted["prediction"].to_numpy())
    np.testing.assert_allclose(got["jsd"].to_numpy(), wanted["jsd"].to_numpy(), rtol=1e-6)
    assert not (tmp_path / "out.bad.parquet").exists() and not (tmp_path / "out.bad.csv").exists()
    assert not list(tmp_path.glob("*.parts")) and not list(tmp_path.glob(".*"))


FOREIGN = {
    "out.parquet": ["out.parquet", "out.bad.parquet", "out.parquet.parts/", ".out.parquet.lock"],
    "out.csv": ["out.csv", "out.bad.csv", "out.csv.parts/", ".out.csv.lock", "out.csv.rating.json"],
    "out": ["out/", "out.parts/", ".out.lock"],
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("form, name", [(form, name) for form, names in FOREIGN.items() for name in names])
@pytest.mark.parametrize("what", ["text", "link", "broken link", "folder", "fifo"])
def test_files_of_others_are_refused_by_name(tmp_path, data, classifier, form, name, what, overwrite):
    path = tmp_path / name.rstrip("/")
    (tmp_path / "thesis").write_text("my thesis")
    if what == "text":
        path.write_text("my thesis")
    elif what == "link":
        path.symlink_to(tmp_path / "thesis")
    elif what == "broken link":
        path.symlink_to(tmp_path / "nowhere")
    elif what == "folder":
        path.mkdir()
        (path / "part-000000.parquet").write_text("my thesis")
    else:
        os.mkfifo(path)
    named = name.rstrip("/").replace(".", r"\.")
    refused(tmp_path, data, classifier, tmp_path / form, match=named, overwrite=overwrite, **SETTINGS)


@pytest.mark.parametrize("form", ["out.parquet", "out.csv"])
def test_parquet_and_text_of_others_are_refused(tmp_path, data, classifier, form):
    for name in (form, form.replace("out", "out.bad")):
        path = tmp_path / name
        table = pa.table({"source": ["a"], "row": [1], "id": ["x"], "reason": ["y"], "content": [""]})
        pq.write_table(table, path) if form == "out.parquet" else pacsv.write_csv(table, path)
        for overwrite in (False, True):
            refused(tmp_path, data, classifier, tmp_path / form, match=name, overwrite=overwrite, **SETTINGS)
        path.unlink()


def test_a_file_of_bad_rows_is_no_result(tmp_path, data, classifier):
    x = rows(40)
    x[3] = np.nan
    rate(write_parquet(tmp_path / "y.parquet", x), classifier, tmp_path / "out.parquet", id="key")
    assert (tmp_path / "out.bad.parquet").exists()
    refused(tmp_path, data, classifier, tmp_path / "out.bad.parquet", match="no rating", overwrite=True, **SETTINGS)


def test_things_put_into_our_folders_stay(tmp_path, data, classifier, other):
    out = tmp_path / "out"
    rate(data, classifier, out, **SETTINGS)
    for name in ("notes.txt", "_bad/notes.txt", "part-000009.parquet"):
        (out / name).write_text("mine")
        refused(tmp_path, data, other, out, match=name, overwrite=True, **SETTINGS)
        (out / name).unlink()
    (out / "part-000001.parquet").write_text("mine")  # in place of ours: found when ours are removed
    rate(data, other, out, overwrite=True, **SETTINGS)
    assert (tmp_path / "out.parts" / "part-000001.parquet").read_text() == "mine"
    assert read(out).num_rows == 40


def test_parts_of_another_run_are_not_taken(tmp_path, data, classifier, other):
    out = tmp_path / "out.parquet"
    parts = interrupted(data, classifier, out, 25)
    interrupted(data, other, tmp_path / "another.parquet", 25)
    part, stranger = parts / "part-000001.parquet", tmp_path / "another.parquet.parts" / "part-000001.parquet"
    whole = part.read_bytes()
    for content in (stranger.read_bytes(), whole[:-9], (parts / "part-000000.parquet").read_bytes()):
        part.write_bytes(content)
        before = snapshot(tmp_path)
        with pytest.raises(InvalidValue, match=r"part-000001\.parquet` is no part of this rating"):
            rate(data, classifier, out, **SETTINGS)
        assert snapshot(tmp_path) == before
    part.unlink()
    done = rate(data, classifier, out, **SETTINGS)
    assert (done.rows, done.resumed) == (40, 10)
    assert read(out)["row"].to_pylist() == list(range(40))


def interrupted(data, model, out: Path, after: int = 15, **options) -> Path:
    """A run that stops after some rows; its folder of parts."""

    def stop(done: int, bad: int, total: int) -> None:
        if done + bad > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rate(data, model, out, progress=stop, **{**SETTINGS, **options})
    return out.with_name(out.name + ".parts")


@pytest.mark.parametrize("form", FORMS)
def test_files_put_in_the_way_while_a_run_is_at_work(tmp_path, data, classifier, form):
    out = tmp_path / form
    parts = interrupted(data, classifier, out)
    assert parts.is_dir() and not out.exists()
    for path in (out, parts / "notes.txt"):
        path.write_text("mine")
        refused(tmp_path, data, classifier, out, match=path.name, **SETTINGS)
        refused(tmp_path, data, classifier, out, match=path.name, overwrite=True, **SETTINGS)
        path.unlink()

    def put(done: int, bad: int, total: int) -> None:
        if done == 40:
            out.write_text("mine")

    with pytest.raises(InvalidValue, match=form):
        rate(data, classifier, out, progress=put, **SETTINGS)
    assert out.read_text() == "mine"
    out.unlink()
    done = rate(data, classifier, out, **SETTINGS)
    assert (done.rows, done.resumed) == (40, 40) and read(out)["row"].to_pylist() == list(range(40))


# ---- every moment


class Killed(BaseException):
    """As the death of the process: nothing below this is caught or cleaned up."""


STEPS = ("replace", "rename", "unlink", "rmdir", "mkdir", "link")


# Only folders are exchanged.
@pytest.mark.parametrize("form, exchanging", [*((form, True) for form in FORMS), ("out", False)])
def test_killed_at_any_step_an_earlier_result_is_whole(tmp_path, classifier, other, form, exchanging, monkeypatch):
    """Every call that changes a folder is made the last one, in turn."""
    x = rows(20)
    x[3] = np.nan
    (tmp_path / "in").mkdir()
    data = write_parquet(tmp_path / "in" / "x.parquet", x)
    settings = {"id": "key", "batch_size": 20}
    if not exchanging:
        monkeypatch.setattr(store, "exchange", lambda *paths: False)
    for name, model in (("old", classifier), ("new", other)):
        (tmp_path / name).mkdir()
        rate(data, model, tmp_path / name / form, **settings)
    wanted = {name: values(tmp_path / name / form) for name in ("old", "new")}
    assert wanted["old"] != wanted["new"]
    for last in range(100):
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        shutil.copytree(tmp_path / "old", tmp_path / "work")
        out = tmp_path / "work" / form
        with pytest.MonkeyPatch.context() as patch:
            steps = die_after(patch, last, tmp_path / "work")
            try:
                rate(data, other, out, overwrite=True, **settings)
                finished = True
            except Killed:
                finished = False
        there = values(out) if out.exists() else None
        if exchanging or there is not None:
            assert there in wanted.values(), steps
        else:  # two renames instead of an exchange: between them the earlier result has another name
            assert values(tmp_path / "work" / "out.parts" / "_earlier") == wanted["old"]
        done = rate(data, other, out, overwrite=not finished and there == wanted["old"], **settings)
        assert (done.rows, done.bad) == (19, 1), steps
        assert values(out) == wanted["new"] and bad_rows(out) == [3], steps
        left = {p.name for p in (tmp_path / "work").iterdir()}
        assert left - {f".{form}.lock"} == {p.name for p in (tmp_path / "new").iterdir()}, steps
        if finished:
            assert last > 8
            return
    pytest.fail("never finished")


def values(out: Path) -> list:
    return read(out).select(["row", "id", "prediction", "jsd"]).to_pylist()


def bad_rows(out: Path) -> list[int]:
    if out.is_dir():
        return pyarrow.dataset.dataset(out / "_bad", ignore_prefixes=["."]).to_table()["row"].to_pylist()
    return read(out.with_name(f"{out.stem}.bad{out.suffix}"))["row"].to_pylist()


def die_after(patch: pytest.MonkeyPatch, last: int, below: Path) -> list[str]:
    """Only so many changes to the files below a folder; the next and all later ones do not happen."""
    steps: list[str] = []

    def limited(name: str, call):
        def limit(path, *rest, **named):
            if not str(path).startswith(str(below)):
                return call(path, *rest, **named)
            if len(steps) >= last:
                raise Killed(name)
            steps.append(f"{name} {Path(path).name}")
            return call(path, *rest, **named)

        return limit

    for name in STEPS:
        patch.setattr(os, name, limited(name, getattr(os, name)))
    patch.setattr(store, "exchange", limited("exchange", store.exchange))
    return steps


# ---- the lock


def test_a_lock_is_never_truncated_followed_or_left(tmp_path, data, classifier):
    out, name = tmp_path / "out.parquet", tmp_path / ".out.parquet.lock"
    name.write_bytes(b"")  # whose it is cannot be told: it serves, and stays
    assert rate(data, classifier, out, **SETTINGS).rows == 40 and name.read_bytes() == b""
    name.write_bytes(lock.MARK)  # of a process that was killed
    assert rate(data, classifier, out, **SETTINGS).rows == 40 and not name.exists()
    (tmp_path / "deep").mkdir()
    with pytest.raises(InvalidValue, match="another process"), lock.locked(out), lock.locked(out):
        pass
    assert not name.exists()


def test_a_lock_that_was_removed_is_locked_again(tmp_path, monkeypatch):
    import fcntl

    out, name = tmp_path / "out", tmp_path / ".out.lock"
    call, calls = fcntl.flock, []

    def late(descriptor, operation):
        calls.append(descriptor)
        if len(calls) == 1:  # its owner removes it after we opened it
            name.unlink()
        return call(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.locked(out):
        assert len(calls) == 2 and name.read_bytes() == lock.MARK


def test_folders_made_for_nothing_are_removed(tmp_path, data, classifier):
    with pytest.raises(KeyError), lock.locked(tmp_path / "a" / "b" / "out"):
        raise KeyError
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match="no folder"):
        rate(data, classifier, tmp_path / "file" / "out.parquet", **SETTINGS)


# ---- names and text


@pytest.mark.parametrize("name", ["rated.json", "rated.csv.gz", "rated.xlsx", "rated.feather", "..", "rated.txt"])
def test_names_that_say_no_form_are_refused(tmp_path, data, classifier, name):
    match = "no name for a result" if name == ".." else "results are written to"
    refused(tmp_path, data, classifier, tmp_path / name, match=match, **SETTINGS)


def test_a_slash_makes_a_folder(tmp_path, data, classifier):
    out = f"{tmp_path}/rated.v2/"
    assert rate(data, classifier, out, **SETTINGS).rows == 40
    assert rate(data, classifier, out, **SETTINGS).resumed == 40
    assert {"_manifest.json", "part-000000.parquet"} < {p.name for p in Path(out).iterdir()}


@pytest.mark.parametrize("form", ["out.csv", "out.tsv"])
def test_text_holds_what_parquet_holds(tmp_path, classifier, form):
    x = rows(30)
    x[[4, 20]] = np.nan
    names = [f'n "{i}",\n\tä' if i % 3 else f"n{i}" for i in range(30)]
    names[6] = ""
    columns = {f"f{i}": x[:, i] for i in range(FEATURES)}
    pq.write_table(pa.table({"name": names, **columns}), tmp_path / "x.parquet", row_group_size=10)
    settings = {"id": "name", "part_rows": 10, "batch_size": 10}
    one = rate(tmp_path / "x.parquet", classifier, tmp_path / "out.parquet", **settings)
    two = rate(tmp_path / "x.parquet", classifier, tmp_path / form, **settings)
    ending = form.removeprefix("out")
    assert (one.rows, one.bad) == (two.rows, two.bad) == (28, 2)
    assert two.bad_out == str(tmp_path / f"out.bad{ending}")
    for end in ("", ".bad"):
        wanted = pq.read_table(tmp_path / f"out{end}.parquet")
        with open(tmp_path / f"out{end}{ending}", newline="", encoding="utf-8") as file:
            header, *found = csv.reader(file, delimiter="\t" if ending == ".tsv" else ",")
        assert header == wanted.column_names
        for k, name in enumerate(header):
            values = wanted[name].to_pylist()
            if pa.types.is_floating(wanted.schema.field(name).type):
                assert [np.float32(row[k]) for row in found] == [np.float32(v) for v in values]
            else:
                assert [row[k] for row in found] == [str(v) for v in values]
    described = json.loads((tmp_path / f"{form}.rating.json").read_text())
    assert (described["rows"], described["bad"], described["complete"]) == (28, 2, True)
    assert rate(tmp_path / "x.parquet", classifier, tmp_path / form, **settings).resumed == 30


def test_text_that_was_edited_is_not_ours_any_more(tmp_path, data, classifier):
    out = tmp_path / "out.csv"
    rate(data, classifier, out, **SETTINGS)
    out.write_text(out.read_text() + "a note\n")
    for overwrite in (False, True):
        refused(tmp_path, data, classifier, out, match="was changed since", overwrite=overwrite, **SETTINGS)
    out.unlink()
    assert rate(data, classifier, out, **SETTINGS).resumed == 0
    (tmp_path / "out.csv.rating.json").unlink()
    refused(tmp_path, data, classifier, out, match="is no rating of ours", overwrite=True, **SETTINGS)


def test_text_goes_on_where_it_stopped(tmp_path, data, classifier):
    out = tmp_path / "out.csv"
    interrupted(data, classifier, out)
    assert not out.exists()
    done = rate(data, classifier, out, **SETTINGS)
    assert (done.rows, done.resumed) == (40, 10) and read(out)["row"].to_pylist() == list(range(40))


@pytest.mark.parametrize("kind", ["date", "dictionary", "bytes", "list"])
def test_ids_of_every_type_in_text(tmp_path, classifier, kind):
    values = {
        "date": pa.array([0, 1, 2], pa.date32()),
        "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
        "bytes": pa.array([b"a", b"b", b"c"]),
        "list": pa.array([["a"], ["b"], []]),
    }[kind]
    x = rows(3)
    table = pa.table({"name": values, **{f"f{i}": x[:, i] for i in range(FEATURES)}})
    pq.write_table(table, tmp_path / "x.parquet")
    features = [f"f{i}" for i in range(FEATURES)]
    out = tmp_path / "out.csv"
    if kind in ("bytes", "list"):
        refused(tmp_path, tmp_path / "x.parquet", classifier, out, match="no form", id="name", columns=features)
        return
    rate(tmp_path / "x.parquet", classifier, out, id="name", columns=features)
    wanted = {"date": ["1970-01-01", "1970-01-02", "1970-01-03"], "dictionary": ["a", "b", "a"]}[kind]
    with open(out, newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == wanted


def test_lost_files_of_a_result_are_named(tmp_path, data, classifier):
    rate(data, classifier, tmp_path / "out", **SETTINGS)
    (tmp_path / "out" / "part-000002.parquet").unlink()
    refused(tmp_path, data, classifier, tmp_path / "out", match=r"lacks .*part-000002", **SETTINGS)
    assert rate(data, classifier, tmp_path / "out", overwrite=True, **SETTINGS).rows == 40
    x = rows(10)
    x[3] = np.nan
    worse = write_parquet(tmp_path / "worse.parquet", x)
    rate(worse, classifier, tmp_path / "y.parquet", id="key")
    (tmp_path / "y.bad.parquet").unlink()
    refused(tmp_path, worse, classifier, tmp_path / "y.parquet", match=r"lacks .*y\.bad\.parquet", id="key")


def test_an_unfinished_overwriting_run_is_continued(tmp_path, data, classifier, other):
    out = tmp_path / "out.parquet"
    rate(data, classifier, out, **SETTINGS)
    before = values(out)
    interrupted(data, other, out, overwrite=True)
    assert values(out) == before
    assert rate(data, classifier, out, **SETTINGS).resumed == 40  # still there
    with pytest.raises(InvalidValue, match="continues the unfinished run"):
        rate(data, other, out, **SETTINGS)
    assert rate(data, other, out, overwrite=True, **SETTINGS).resumed == 10
    assert values(out) != before


def test_a_result_may_be_made_anew(tmp_path, data, classifier):
    out = tmp_path / "out.parquet"
    rate(data, classifier, out, **SETTINGS)
    run = json.loads(pq.read_schema(out).metadata[claims.RESULT])["run"]
    done = rate(data, classifier, out, overwrite=True, **SETTINGS)
    assert done.resumed == 0 and json.loads(pq.read_schema(out).metadata[claims.RESULT])["run"] != run


def test_exchange_swaps_two_folders(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if writing.exchange(tmp_path / "a", tmp_path / "b"):
        assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    assert not writing.exchange(tmp_path / "a", tmp_path / "c")


def test_command_refuses_to_eat_its_input(tmp_path, data, classifier):
    classifier.save(tmp_path / "model.favour")
    before = snapshot(tmp_path)
    for arguments in (
        (tmp_path / "model.favour", data, "--out", data, "--overwrite", "--id", "key"),
        (tmp_path / "mistyped.favour", data, "--out", data, "--overwrite", "--id", "key"),
        (tmp_path / "model.favour", data, "--out", tmp_path / "rated.json", "--id", "key"),
    ):
        result = command(*arguments)
        assert result.exit_code != 0 and isinstance(result.exception, FavourError)
        assert snapshot(tmp_path) == before
    assert command(tmp_path / "model.favour", data, "--out", tmp_path / "r.csv", "--id", "key").exit_code == 0
    assert (tmp_path / "r.csv").is_file()
