"""CSV files: every row right, or a reason that names file, row and column."""

import csv
import io
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_rate import FEATURES, check_values, command, expected, network
from test_rate_files import refused

import favour
from favour.errors import CorruptFile, FavourError, InvalidValue
from favour.rating import rate, reading, sources, text


@pytest.fixture(scope="module")
def classifier():
    return favour.compile(network(3), torch.zeros(2, FEATURES))


def write(tmp_path, content, name="x.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rated(tmp_path, content, classifier, **options):
    """Good and bad rows."""
    rate(write(tmp_path, content), classifier, tmp_path / "out.parquet", **options)
    bad = tmp_path / "out.bad.parquet"
    return pq.read_table(tmp_path / "out.parquet"), pq.read_table(bad).to_pylist() if bad.exists() else []


FOUR = "1,2,3,4\n5,6,7,8\n"
X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)


# ---- the first line


@pytest.mark.parametrize("names", ["a,a,b,c", "a, a,b,c", "a,b,c,c ", '"a",a,b,c', "\ufeffa,a,b,c"])
def test_columns_of_the_same_name_are_refused(tmp_path, classifier, names):
    data = write(tmp_path, f"{names}\n{FOUR}")
    refused(tmp_path, data, classifier, tmp_path / "out.parquet", match=r"x\.csv.*same name", error=CorruptFile)
    refused(
        tmp_path, data, classifier, tmp_path / "out.parquet", match="same name", error=CorruptFile, columns=list("abc")
    )


def test_columns_of_the_same_name_in_parquet_are_refused(tmp_path, classifier):
    table = pa.Table.from_arrays([pa.array([1.0])] * 4, names=["a", "a", "b", "c"])
    pq.write_table(table, tmp_path / "x.parquet")
    refused(
        tmp_path, tmp_path / "x.parquet", classifier, tmp_path / "o.parquet", match="same name: `a`", error=CorruptFile
    )


def test_a_column_asked_for_twice_is_refused(tmp_path, classifier):
    data = write(tmp_path, f"a,b,c,d\n{FOUR}")
    refused(tmp_path, data, classifier, tmp_path / "o.parquet", match="names a twice", columns=["a", "a", "b", "c"])


@pytest.mark.parametrize("first", ["2019,2020,2021,2022", "1,2,3,4", "a,b,c,2020", "ada,1,2,3", "nan,a,b,c"])
def test_a_first_line_with_numbers_is_asked_about(tmp_path, classifier, first):
    data = write(tmp_path, f"{first}\n{FOUR}")
    for options in ({}, {"columns": ["x", "y"]}):
        refused(tmp_path, data, classifier, tmp_path / "out.parquet", match=r"x\.csv.*--no-header", **options)
    names = first.split(",")
    rate(data, classifier, tmp_path / "named.parquet", header=True)
    table = pq.read_table(tmp_path / "named.parquet")
    check_values(table, expected(classifier, X))
    assert table["row"].to_pylist() == [0, 1]
    rate(data, classifier, tmp_path / "chosen.parquet", columns=names)
    assert pq.read_table(tmp_path / "chosen.parquet").equals(table)
    if first == "1,2,3,4":
        for i, options in enumerate(({"header": False}, {"columns": [f"column_{i}" for i in range(4)]})):
            rate(data, classifier, tmp_path / f"row{i}.parquet", **options)
            check_values(pq.read_table(tmp_path / f"row{i}.parquet"), expected(classifier, X[[0, 0, 1]]))


def test_a_header_said_to_be_a_row_is_refused(tmp_path, classifier):
    data = write(tmp_path, f"a,b,c,d\n{FOUR}")
    refused(tmp_path, data, classifier, tmp_path / "out.parquet", match="holds no number", header=False)
    write(tmp_path, FOUR, "y.csv")
    both = [tmp_path / "y.csv", data]
    refused(tmp_path, both, classifier, tmp_path / "out.parquet", match=r"x\.csv.*holds no number", header=False)
    refused(tmp_path, both[::-1], classifier, tmp_path / "out.parquet", match=r"y\.csv` has no column 'a'")
    np.save(tmp_path / "x.npy", X)
    refused(tmp_path, tmp_path / "x.npy", classifier, tmp_path / "out.parquet", match="belongs to CSV", header=False)


def test_an_index_that_was_written_along_is_no_feature(tmp_path, classifier):
    data = write(tmp_path, ",a,b,c,d\n0,1,2,3,4\n1,5,6,7,8\n")
    refused(tmp_path, data, network(3), tmp_path / "out.parquet", match=r"column 1 of .*x\.csv.* no name")
    rate(data, classifier, tmp_path / "out.parquet", columns=list("abcd"))
    check_values(pq.read_table(tmp_path / "out.parquet"), expected(classifier, X))
    refused(
        tmp_path,
        write(tmp_path, f",,,\n{FOUR}"),
        classifier,
        tmp_path / "o2.parquet",
        match="names no column",
        error=CorruptFile,
    )


def test_command_takes_header_and_quoted_names(tmp_path, classifier):
    classifier.save(tmp_path / "model.favour")
    data = write(tmp_path, f"1,2,3,4\n{FOUR}")
    arguments = (tmp_path / "model.favour", data, "--out")
    assert "no-header" in str(command(*arguments, tmp_path / "a.parquet").exception)
    assert command(*arguments, tmp_path / "a.parquet", "--no-header").exit_code == 0
    assert command(*arguments, tmp_path / "b.parquet", "--header").exit_code == 0
    assert [pq.read_metadata(tmp_path / f"{n}.parquet").num_rows for n in "ab"] == [3, 2]
    data = write(tmp_path, f'"a,1",b,c,d\n{FOUR}')
    result = command(*arguments, tmp_path / "c.parquet", "--columns", '"a,1", b,c,d')
    assert result.exit_code == 0, result.output


# ---- what a file is


@pytest.mark.parametrize(
    "content, match",
    [
        (b"", "is empty"),
        (b"\n1,2,3,4\n", "begins with an empty line"),
        (b"a,b,c,d\n", r"no row to rate in .*x\.csv"),
        (b"a,b,c,d", r"no row to rate in .*x\.csv"),
        (b"\xef\xbb\xbf", "is empty"),
        ("a,b,c,d\n1,2,3,4\n".encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"PK\x03\x04", "zip archive"),
        ("a,b,c,né\n1,2,3,4\n".encode("latin-1"), r"column 4 in the first line of .*x\.csv.*not UTF-8"),
        (b"a;b;c;d\n1;2;3;4\n", "separated by semicolons"),
        (b"a\tb\tc\td\n1\t2\t3\t4\n", "separated by tabs"),
        (b'a,b,c,d\n1,2,3,4\n1,2,3,"4\n5,6,7,8\n', r"record 2 of .*x\.csv.*never closed"),
        (b'a,b,c,d\n1,2,3,4\n1,2,3,"4', "never closed"),
        (b'a,b,c,d\n"1,5","2,5","3,5","4,5"\n', r"no column of numbers; it has a, b, c, d"),
    ],
)
def test_files_that_cannot_be_read_say_why(tmp_path, classifier, content, match):
    data = write(tmp_path, content)
    refused(tmp_path, data, classifier, tmp_path / "out.parquet", match=match, error=FavourError)


def test_marks_endings_and_quotes_change_nothing(tmp_path, classifier):
    wanted = expected(classifier, X)
    mark = "\ufeff"
    for i, content in enumerate(
        [
            f"{mark}a,b,c,d\n{FOUR}",
            f'{mark}"a\nb",b,c,d\n{FOUR}',
            f'{mark}"a",b,c,d\r\n{FOUR}'.replace("\n", "\r\n").replace("\r\r", "\r"),
            f"a,b,c,d\n{FOUR}".replace("\n", "\r"),
            '"a","b","c","d"\n"1","2","3","4"\n"5","6","7","8"\n',
            " a , b,c,d\n 1 ,2,3, 4\n5,6,7,8",
            f"a,b,c,d\n\n{FOUR}\n\n",
        ]
    ):
        rate(write(tmp_path, content), classifier, tmp_path / f"{i}.parquet")
        table = pq.read_table(tmp_path / f"{i}.parquet")
        assert table["row"].to_pylist() == [0, 1], content
        check_values(table, wanted)
    rate(write(tmp_path, f"{mark}{FOUR}"), classifier, tmp_path / "plain.parquet", header=False)
    check_values(pq.read_table(tmp_path / "plain.parquet"), wanted)


@pytest.mark.parametrize(
    "names, given, match",
    [("a,b,c,d,e", "1,2,3,4,\n", "neither one of numbers nor one of text"), ("a,b,c,d,e", "1,2,3,4,x\n" * 3, None)],
)
def test_columns_that_may_be_numbers_are_asked_about(tmp_path, classifier, names, given, match):
    data = write(tmp_path, f"{names}\n{given}")
    if match:
        refused(tmp_path, data, classifier, tmp_path / "out.parquet", match="column `e`.*neither")
        assert rate(data, classifier, tmp_path / "out.parquet", columns=list("abcd")).rows == 1
        write(tmp_path, names + "\n" + "1,2,3,4,x\n" * 3 + "1,2,3,4,5\n")
        refused(tmp_path, data, network(3), tmp_path / "o.parquet", match="column `e`.*neither")
    else:
        assert rate(data, classifier, tmp_path / "out.parquet").columns == tuple("abcd")


# ---- rows


@pytest.mark.parametrize(
    "field, reason",
    [
        ("", "column `c` is missing"),
        ("  ", "column `c` is missing"),
        ('"1,5"', "column `c` is no number: '1,5'"),
        ('"1,234.5"', "column `c` is no number: '1,234.5'"),
        ("1 234", "no number"),
        ("1_000", "no number"),
        ("0x1F", "no number"),
        ("1e400", "no finite float32"),
        ("1e39", "no finite float32"),
        ("nan", "no finite float32"),
        ("-Infinity", "no finite float32"),
        ("NA", "no number: 'NA'"),
        ("null", "no number"),
        ("true", "no number"),
        ("3,3", "5 fields instead of 4"),
        ("\x00", "no number"),
        ("2024-01-01", "no number"),
    ],
)
def test_fields_that_are_no_numbers_are_reported(tmp_path, classifier, field, reason):
    """In the last row of a unit, with and without others that are bad: the way a unit is read changes nothing."""
    for more in ("", "x,x,x,x\n"):
        content = f"a,b,c,d\n{FOUR}1,2,{field},4\n{more}"
        good, bad = rated(tmp_path, content, classifier, overwrite=True)
        assert good["row"].to_pylist() == [0, 1]
        assert bad[0]["row"] == 2 and reason in bad[0]["reason"], bad
        assert bad[0]["source"] == str(tmp_path / "x.csv")


@pytest.mark.parametrize("field", [" 3", "+3", "3.", "03", "3e0", "30e-1", ".3e1", "3.0000000001"])
def test_fields_that_are_numbers_are_read(tmp_path, classifier, field):
    for more in ("", "x,x,x,x\n"):
        good, _ = rated(tmp_path, f"a,b,c,d\n1,2,{field},4\n5,6,7,8\n{more}", classifier, overwrite=True)
        check_values(good, expected(classifier, X))


NUMBERS = st.one_of(
    st.floats().map(repr),
    st.integers(-(2**70), 2**70).map(str),
    st.text(st.sampled_from('0123456789.eE+-xX_ ,naif"\n'), max_size=8),
    st.sampled_from(["0x10", "1e5", "-0", "1.0", "9007199254740993", "٣", "infinity", "NaN", "1f", "1d", "0b1", "1."]),
)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4), st.sampled_from(["float32", "float64", "int64"]))
def test_both_ways_of_reading_agree(tmp_path_factory, records, dtype):
    """Arrow's parser, and record by record, which meets whatever Arrow's refuses."""
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerows([["x", "y"], *records])
    file = tmp_path_factory.getbasetemp() / "agree.csv"
    file.write_bytes(stream.getvalue().encode())
    read = reading.Reading(("x", "y"), "x", dtype, (2,))
    answers = []
    for slow in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if slow:
                patch.setattr("pyarrow.csv.read_csv", lambda *a, **o: (_ for _ in ()).throw(pa.ArrowInvalid("no")))
            found = [c for u in sources._records(str(file), 9, ("x",)) for c in reading.chunks(u, read, 9)]
        answers.append(
            [
                (c.x.tolist(), c.rows.tolist(), c.ids.to_pylist(), [(b.row, b.reason, b.id) for b in c.bad])
                for c in found
            ]
        )
    assert answers[0] == answers[1]
    for x, numbers, *_ in answers[0]:
        for row, number in zip(x, numbers, strict=True):
            for value, field in zip(row, [r for r in records][number], strict=True):
                exact = int(field) if dtype == "int64" and field.strip().lstrip("+-").isdigit() else float(field)
                assert value == np.dtype(dtype).type(exact)


@pytest.mark.parametrize("n", [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)])
def test_large_whole_numbers_keep_their_digits(n):
    read = reading.Reading(("x",), None, "int64", (1,))
    for column in (pa.array([n, None]), pa.array([str(n), "x"])):
        chunk = reading.from_table(pa.table({"x": column}), "f", np.arange(2), read)
        assert chunk.x.tolist() == [[n]] and [b.row for b in chunk.bad] == [1]
    read = reading.Reading(("x",), None, "int64", (2,))
    chunk = reading.from_table(pa.table({"x": pa.array([[n, 1], [n, None]])}), "f", np.arange(2), read)
    assert chunk.x.tolist() == [[n, 1]] and "value 1 of column `x` is missing" in chunk.bad[0].reason


@pytest.mark.parametrize("n", [2**63, -(2**63) - 1, 2**64 - 1, 10**30])
def test_numbers_beyond_64_bits_are_reported(n):
    read = reading.Reading(("x",), None, "int64", (1,))
    columns = [pa.array([str(n)])] + ([pa.array([n], pa.uint64())] if 0 <= n < 2**64 else [])
    for column in columns:
        chunk = reading.from_table(pa.table({"x": column}), "f", np.arange(1), read)
        assert not len(chunk.x) and str(n) in chunk.bad[0].reason


def test_ids_are_copied_to_the_last_digit(tmp_path, classifier):
    names = ["9007199254740993", "007", "", " x ", "9007199254740993", "ä", "1e3"]
    content = "name,a,b,c,d\n" + "".join(f"{name},1,2,3,4\n" for name in names)
    for more in ("", "y,x,2,3,4\n"):
        good, _ = rated(tmp_path, content + more, classifier, id="name", overwrite=True, columns=list("abcd"))
        assert good["id"].to_pylist() == names
    wide = pa.table({"name": pa.array([2**53 + 1, None, 2**63 - 1]), **{n: [1.0] * 3 for n in "abcd"}})
    pq.write_table(wide, tmp_path / "x.parquet")
    rate(tmp_path / "x.parquet", classifier, tmp_path / "p.parquet", id="name")
    assert pq.read_table(tmp_path / "p.parquet")["id"].to_pylist() == [2**53 + 1, None, 2**63 - 1]
    data = write(tmp_path, content)
    match = r"x\.csv` has no column nam; it has name, a"
    refused(tmp_path, data, classifier, tmp_path / "o.parquet", match=match, id="nam", columns=list("abcd"))


def test_text_that_is_no_utf8_is_reported_where_it_matters(tmp_path, classifier):
    content = b"name,note,a,b,c,d\nada,x,1,2,3,4\n\xe9va,x,1,2,3,4\nbob,caf\xe9,5,6,7,8\nx,x,1,2,3,\xe94\n"
    good, bad = rated(tmp_path, content, classifier, id="name", columns=list("abcd"))
    assert good["id"].to_pylist() == ["ada", "bob"]
    assert [b["row"] for b in bad] == [1, 3]
    assert bad[0]["reason"] == r"column `name` is no UTF-8: '\\xe9va'" and "`d` is no UTF-8" in bad[1]["reason"]
    assert bad[0]["content"].startswith(r"\xe9va")


def test_a_wrong_field_in_the_hundred_thousandth_row(tmp_path, classifier):
    lines = ["1,2,3,4\n"] * 120_000
    lines[99_999] = "1,2,three,4\n"
    good, bad = rated(tmp_path, "a,b,c,d\n" + "".join(lines), classifier, batch_size=1024)
    assert [(b["row"], b["reason"]) for b in bad] == [(99_999, "column `c` is no number: 'three'")]
    assert good.num_rows == 119_999 and good["row"][99_999].as_py() == 100_000


@pytest.mark.parametrize("kind", ["timestamp", "list", "binary"])
def test_columns_of_a_later_file_that_are_no_numbers_are_refused(tmp_path, classifier, kind):
    """Dates were read as nanoseconds."""
    wrong = {
        "timestamp": pa.array([0], pa.timestamp("ns")),
        "list": pa.array([[1.0]]),
        "binary": pa.array([b"1"]),
    }[kind]
    for name, column in (("a", pa.array([1.0])), ("b", wrong)):
        pq.write_table(pa.table({**{f"f{i}": [1.0] for i in range(3)}, "f3": column}), tmp_path / f"{name}.parquet")
    data = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    refused(tmp_path, data, classifier, tmp_path / "out.parquet", match=r"column `f3` of .*b\.parquet` holds")
    columns = [f"f{i}" for i in range(4)]
    out = tmp_path / "out.parquet"
    refused(tmp_path, data[1], classifier, out, match=r"`f3`.* holds", columns=columns)


def test_text_and_dictionaries_of_numbers_in_parquet_are_read(tmp_path, classifier):
    table = pa.table(
        {"a": ["1", "5"], "b": pa.array([2.0, 6.0]).dictionary_encode(), "c": [3, 7], "d": pa.array(["4", "8"])}
    )
    pq.write_table(table, tmp_path / "x.parquet")
    rate(tmp_path / "x.parquet", classifier, tmp_path / "out.parquet", columns=list("abcd"))
    check_values(pq.read_table(tmp_path / "out.parquet"), expected(classifier, X))


def test_a_pipe_is_no_file(tmp_path, classifier):
    os.mkfifo(tmp_path / "x.csv")
    with pytest.raises(InvalidValue, match="no regular file"):
        rate(tmp_path / "x.csv", classifier, tmp_path / "out.parquet")


def test_numbers_and_whole_numbers():
    assert text.whole(" 12 ") == 12 and text.whole("1e2") == 100.0 and text.whole("1_0") is None


def test_first_rows_that_overflow_are_bad_rows_and_no_end_of_the_job(tmp_path, classifier):
    """The columns of the result are seen by an answer to the first rows."""
    good, bad = rated(tmp_path, "a,b,c,d\n1e38,1e38,1e38,1e38\n1,2,3,4\n1e38,-1e38,1,1\n5,6,7,8\n", classifier)
    assert good["row"].to_pylist() == [1, 3]
    assert [(b["row"], b["reason"].startswith("the model")) for b in bad] == [(0, True), (2, True)]
