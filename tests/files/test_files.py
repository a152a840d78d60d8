"""Files of every format: damaged, crafted, oversized, written by earlier versions, by many at once; and pickles."""

import copy
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import favour
from favour.errors import FailedPrediction, UncheckedFile
from favour.files.checksum import DIGITS, MARK
from favour.graph.operations import operation

aten = torch.ops.aten


class Recommender(nn.Module):
    """Two tables read by columns, and a third by columns with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.tags = nn.Embedding(20, 4), nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.register_buffer("offsets", torch.tensor([0, 3]))
        self.dropout, self.top = nn.Dropout(0.3), nn.Linear(8, 1)

    def forward(self, x):
        both = self.users(x[:, 0]) + self.items(x[:, 1])
        return self.top(self.dropout(torch.cat([both, self.tags(x[:, 2:] + self.offsets).mean(1)], 1)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)).eval()


def inputs(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def predict():
    torch.manual_seed(0)
    return favour.compile(network(), torch.zeros(2, 3), check=False)


@pytest.fixture(scope="module")
def saved(predict, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "p.favour"
    predict.save(path)
    return path


@pytest.fixture(scope="module")
def exported(predict, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")

    def write(form):
        path = folder / f"net.{form}"
        if not path.exists():
            if form == "onnx":
                pytest.importorskip("onnxruntime")
                pytest.importorskip("onnxscript")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                favour.export(predict, path)
        return path

    return write


def answer(path):
    if str(path).endswith(".favour"):
        with torch.no_grad():
            return favour.load(path)(inputs()).covariance_matrix.numpy()
    return favour.load_exported(path)(inputs())["covariance"]


def file_of(form, saved, exported):
    return saved if form == "favour" else exported(form)


# ------------------------------------------------------------------ checksums


@pytest.mark.parametrize("form", ["favour", "onnx", "pt2"])
def test_every_flipped_byte_is_found(form, saved, exported, tmp_path):
    whole = file_of(form, saved, exported).read_bytes()
    generator = np.random.default_rng(0)
    path = tmp_path / f"flipped.{form}"
    ends = [0, 1, len(whole) - 1, len(whole) - DIGITS, len(whole) - DIGITS - 1, len(whole) - DIGITS - len(MARK) - 1]
    for place in [*ends, *generator.integers(0, len(whole), 100)]:
        content = bytearray(whole)
        content[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(content)
        with pytest.raises(favour.errors.CorruptFile, match="flipped"):
            answer(path)


@pytest.mark.parametrize("form", ["favour", "onnx", "pt2"])
def test_every_truncation_is_found(form, saved, exported, tmp_path):
    whole = file_of(form, saved, exported).read_bytes()
    path = tmp_path / f"cut.{form}"
    places = [
        1,
        2,
        DIGITS,
        DIGITS + len(MARK),
        DIGITS + len(MARK) + 2,
        *np.random.default_rng(0).integers(0, len(whole), 30),
    ]
    for gone in places:
        path.write_bytes(whole[: len(whole) - int(gone)])
        with pytest.raises(favour.errors.CorruptFile, match="cut"):
            answer(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(favour.errors.CorruptFile, match="cut"):
        answer(path)


def test_checksum_is_the_sha256_of_what_is_before_it(saved):
    content = saved.read_bytes()
    assert content[-DIGITS - len(MARK) : -DIGITS] == MARK
    assert hashlib.sha256(content[:-DIGITS]).hexdigest().encode() == content[-DIGITS:]
    assert zipfile.ZipFile(saved).testzip() is None  # any tool may look into it
    assert "graph" in torch.load(saved, weights_only=True)


def test_checksum_of_onnx_is_the_sha256_with_zeros_in_its_place(exported):
    content = exported("onnx").read_bytes()
    (found,) = re.findall(rb"favour_checksum\x12\x40([0-9a-f]{64})", content)
    assert hashlib.sha256(content.replace(found, b"0" * 64)).hexdigest().encode() == found


def earlier(path, form, target):
    """The same content as a version without checksums wrote it."""
    if form == "favour":
        content = torch.load(path, weights_only=True)
        del content["checksum"]
        torch.save(content, target)
    elif form == "pt2":
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
            for item in old.infolist():
                new.writestr(item.filename, old.read(item).replace(b'"checksum": true, ', b""))
    else:
        onnx = pytest.importorskip("onnx")
        model = onnx.load(path)
        texts = {p.key: p.value.replace('"checksum": true, ', "") for p in model.metadata_props}
        texts.pop("favour_checksum")
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, texts)
        onnx.save(model, target)
    return target


@pytest.mark.parametrize("form", ["favour", "onnx", "pt2"])
def test_files_without_a_checksum_load_with_a_warning(form, saved, exported, tmp_path):
    path = file_of(form, saved, exported)
    old = earlier(path, form, tmp_path / f"old.{form}")
    with pytest.warns(UncheckedFile, match=r"no checksum.*again"):
        np.testing.assert_array_equal(answer(old), answer(path))


def test_damage_to_members_is_found_without_a_checksum_too(saved, tmp_path):
    old = earlier(saved, "favour", tmp_path / "old.favour")
    content = bytearray(old.read_bytes())
    with zipfile.ZipFile(old) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
    content[info.header_offset + 200] ^= 4  # among the numbers, which are aligned to 64 bytes
    old.write_bytes(content)
    with pytest.raises(favour.errors.CorruptFile), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        favour.load(old)


# ------------------------------------------------------------------ crafted files


def crafted(saved, tmp_path, change):
    """A file without a checksum whose content and graph were changed by `change(content, graph)`."""
    content = torch.load(saved, weights_only=True)
    content.pop("checksum")
    graph = json.loads(content["graph"])
    change(content, graph)
    content["graph"] = json.dumps(graph)
    path = tmp_path / "crafted.favour"
    torch.save(content, path)
    return path


def refused(path, words="crafted|p.favour"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncheckedFile)
        with pytest.raises(favour.errors.CorruptFile, match=words):
            favour.load(path)


def call(target, args, kwargs=None, shape=("s31", 2), dtype="float32"):
    """Another operation in place of the last one."""

    def change(content, graph):
        symbol = next(n for n in graph["nodes"] if n["kind"] == "input")["shape"][0]
        node = graph["nodes"][-1]
        node["target"], node["args"], node["kwargs"] = target, args, {"dict": kwargs or {}}
        node["shape"], node["dtype"] = [symbol if s == "s31" else s for s in shape], dtype

    return change


X = {"node": "dropout"}
CALLS = {
    "segment_reduce": ("aten.segment_reduce.default", [X, "sum"], {"unsafe": True}),
    "as_strided": ("aten.as_strided.default", [X, [9, 9], [1, 1]]),
    "from_file": ("aten.from_file.default", ["/etc/passwd"]),
    "save": ("aten.save.default", [X, "/tmp/x"]),
    "random": ("aten.randn.default", [[2, 2]]),
    "bernoulli": ("aten.bernoulli_.float", [X, 0.5]),
    "in place": ("aten.add_.Tensor", [X, 1]),
    "out": ("aten.add.out", [X, 1], {"out": X}),
    "empty_strided": ("aten.empty_strided.default", [[2, 2], [1, 1]]),
    "resize": ("aten.resize.default", [X, [1000]]),
    "set": ("aten.set.source_Storage", [X]),
    "record": ("aten._nested_view_from_buffer.default", [X]),
    "outside aten": ("prim.device.default", [X]),
    "negative size": ("aten.full.default", [[-4, 2], 1.0]),
    "enormous size": ("aten.full.default", [[2**40, 2**20], 1.0]),
    "large size": ("aten.full.default", [[2**18, 2**18], 1.0]),
    "repeated": ("aten.repeat.default", [X, [2**30, 2**10]]),
    "padded": ("aten.constant_pad_nd.default", [X, [2**33, 0]]),
    "wrong shape": ("aten.relu.default", [X]),
    "meta device": ("aten.zeros.default", [[2, 2]], {"device": {"device": "meta"}}),
    "sparse": ("aten.zeros.default", [[2, 2]], {"layout": {"torch": "sparse_coo"}}),
    "quantised": ("aten.zeros.default", [[2, 2]], {"dtype": {"torch": "qint8"}}),
    "order of memory": ("aten.zeros_like.default", [X], {"memory_format": -1}),  # torch would crash
    "dtype as a number": ("aten.zeros_like.default", [X], {"dtype": 999}),
    "power": ("python.pow", [9, 10**9]),
    "product of lists": ("python.mul", [[1, 2], 10**9]),
    "truncating division": ("aten.div.Tensor_mode", [{"tensor": "a"}, {"tensor": "b"}], {"rounding_mode": "trunc"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_crafted_calls_are_refused(name, saved, tmp_path):
    def change(content, graph):
        content["arguments"] |= {"a": torch.tensor([-(2**63)]), "b": torch.tensor([-1])}
        shape = ("s31", 2) if name != "wrong shape" else ("s31", 3)
        call(*CALLS[name], shape=shape)(content, graph)

    refused(crafted(saved, tmp_path, change))


def test_tensors_made_of_sizes_alone_are_rehearsed_without_memory():
    """On a machine with much memory the refusal would come too late."""
    from favour.graph.rehearsal import META, made_on_meta

    for target, args, kwargs in (
        (aten.full.default, ([4, 2], 1.0), {}),
        (aten.zeros.default, ([4, 2],), {"device": None}),
        (aten.arange.default, (5,), {"dtype": torch.int64}),
    ):
        assert target(*args, **made_on_meta(target, args, kwargs)).device == META
    x = torch.zeros(2, device=META)
    assert aten.zeros_like.default(x, **made_on_meta(aten.zeros_like.default, (x,), {})).device == META


def test_uninitialised_memory_is_never_answered(saved, tmp_path):
    """`empty` is read as zeros, so that old files of code that fills such tensors still load."""
    for name, filled in (
        ("aten.empty.memory_format", aten.zeros.default),
        ("aten.empty_like.default", aten.zeros_like.default),
        ("aten.new_empty.default", aten.new_zeros.default),
    ):
        assert operation(name) is filled

    def change(content, graph):
        relu = next(n for n in graph["nodes"] if n["target"] == "aten.relu.default")
        relu["target"], relu["kwargs"] = (
            "aten.empty_like.default",
            {"dict": {"memory_format": {"torch": "preserve_format"}}},
        )

    with pytest.warns(UncheckedFile):
        predict = favour.load(crafted(saved, tmp_path, change))
    with torch.no_grad():
        assert torch.equal(predict(inputs()).mean, predict.store.take("3.bias").expand(4, 2))


def test_a_model_that_fills_empty_memory_is_saved(tmp_path):
    class Filling(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            scale = torch.empty(2, device=x.device)
            scale.fill_(2.0)
            return self.body(x) * scale

    predict = favour.compile(Filling().eval(), torch.zeros(2, 3))
    predict.save(tmp_path / "p.favour")
    torch.testing.assert_close(favour.load(tmp_path / "p.favour")(inputs()).mean, predict(inputs()).mean)


def test_what_a_file_may_not_name_is_refused_when_saving(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return self.body(torch.special.bessel_j0(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predict = favour.compile(Odd().eval(), torch.zeros(2, 3))
        with pytest.raises(favour.errors.UnsupportedOperation, match="none of those that files may name"):
            predict.save(tmp_path / "p.favour")
    assert not list(tmp_path.iterdir())


def nan(content, graph):
    content["store"]["0/weight"][0, 0] = float("nan")


def narrow(content, graph):
    content["store"]["0/weight"] = content["store"]["0/weight"][:, :2].clone()


def half(content, graph):
    content["store"]["0/weight"] = content["store"]["0/weight"].half()


def indefinite(content, graph):
    content["posterior"] = json.dumps(
        {"format": 1, "gaussians": [{"names": ["0.weight"], "kind": "Diagonal"}], "latents": [], "means": []}
    )
    content["posterior_tensors"] = {"gaussians.0.diag": -torch.ones(8, 3)}


def misshapen(content, graph):
    indefinite(content, graph)
    content["posterior_tensors"] = {"gaussians.0.diag": torch.ones(8, 4)}


def size(text):
    def change(content, graph):
        graph["nodes"][-1]["shape"][1] = text

    return change


CONTENTS = {"NaN": nan, "shape": narrow, "dtype": half, "negative variance": indefinite, "posterior's shape": misshapen}
CONTENTS |= {
    "a power": size("9**9**9**9"),
    "a long size": size("1+" * 5000 + "1"),
    "nested": size("(" * 300 + "2" + ")" * 300),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_loaded_predictors_are_checked_like_compiled_ones(name, saved, tmp_path):
    refused(crafted(saved, tmp_path, CONTENTS[name]))


def test_masks_with_infinities_load(tmp_path):
    """A constant of the code is no weight."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return self.body(x) + torch.tensor([0.0, float("-inf")]).exp()

    predict = favour.compile(Masked().eval(), torch.zeros(2, 3))
    predict.save(tmp_path / "p.favour")
    torch.testing.assert_close(favour.load(tmp_path / "p.favour")(inputs()).mean, predict(inputs()).mean)


def rewritten(saved, path, change, compression=zipfile.ZIP_STORED):
    """A copy of an archive, member by member."""
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w", compression) as new:
        for item in old.infolist():
            new.writestr(item.filename, change(item.filename.split("/", 1)[1], old.read(item)))
    return path


def test_compressed_members_are_refused(saved, exported, tmp_path):
    refused(rewritten(saved, tmp_path / "a.favour", lambda n, c: c, zipfile.ZIP_DEFLATED), "compressed")
    bomb = rewritten(
        exported("pt2"),
        tmp_path / "bomb.pt2",
        lambda n, c: b"\0" * 2**27 if n == "data/weights/weight_0" else c,
        zipfile.ZIP_DEFLATED,
    )
    assert bomb.stat().st_size < 2**20
    with pytest.raises(favour.errors.CorruptFile, match="compressed"):
        favour.load_exported(bomb)


def test_tensors_stay_within_their_bytes(saved, tmp_path):
    """Torch's own reader takes the number of entries on trust."""

    def longer(name, content):  # a storage of 24 numbers that says it has 250
        return re.sub(rb"(cpuq.)K\x18t", lambda m: m[1] + b"K\xfat", content) if name == "data.pkl" else content

    def wider(name, content):
        return content.replace(b"K\x08K\x03\x86", b"K\xc8K\x03\x86", 1) if name == "data.pkl" else content

    for change in (longer, wider):
        path = rewritten(saved, tmp_path / "p.favour", change)
        assert zipfile.ZipFile(path).read("archive/data.pkl") != zipfile.ZipFile(saved).read("archive/data.pkl")
        refused(path)


def test_tensors_are_not_larger_than_the_file(saved, tmp_path):
    content = torch.load(saved, weights_only=True)
    content["starts"] = {"a": torch.zeros(1).expand(2**20, 2**10)}
    torch.save(content, tmp_path / "p.favour")
    assert (tmp_path / "p.favour").stat().st_size < 10_000
    refused(tmp_path / "p.favour", "much larger than the file")


class Named:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("value", [Named(bytearray, 2**34), Named(os.getcwd), Named(list, (1,)), Named(torch.zeros, 3)])
def test_pickles_call_nothing(value, tmp_path):
    path = tmp_path / "p.favour"
    torch.save({"format": "favour-predictor", "version": 1, "graph": value}, path)
    refused(path, "holds code")


def test_expanded_tensors_are_saved_whole(tmp_path):
    model = network()
    model[3].bias = nn.Parameter(torch.ones(1).expand(2))
    predict = favour.compile(model, torch.zeros(2, 3))
    predict.save(tmp_path / "p.favour")
    torch.testing.assert_close(favour.load(tmp_path / "p.favour")(inputs()).mean, predict(inputs()).mean)


def onnx_with(node, tmp_path, exported, external=False):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(earlier(exported("onnx"), "onnx", tmp_path / "old.onnx"))
    if node is not None:
        model.graph.node.insert(0, node(onnx.helper))
    path = tmp_path / "crafted.onnx"
    if external:
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def test_onnx_files_that_ask_for_more_are_refused(exported, tmp_path):
    for node, words in (
        (lambda h: h.make_node("RandomNormal", [], ["r"], shape=[2]), "RandomNormal"),
        (lambda h: h.make_node("Max", ["input", ""], ["r"]), "without an input"),  # onnxruntime would crash
        (lambda h: h.make_node("Gelu", ["input"], ["r"], domain="com.microsoft"), "outside the standard"),
        (
            lambda h: h.make_node(
                "If",
                ["input"],
                ["r"],
                then_branch=h.make_graph([], "g", [], []),
                else_branch=h.make_graph([], "h", [], []),
            ),
            "If",
        ),
    ):
        with pytest.raises(favour.errors.CorruptFile, match=words):
            favour.load_exported(onnx_with(node, tmp_path, exported))
    with pytest.raises(favour.errors.CorruptFile, match="another file"):
        favour.load_exported(onnx_with(None, tmp_path, exported, external=True))


def test_products_over_nothing_do_not_kill_the_process(exported, tmp_path):
    """onnxruntime divides by zero in a product over no entries that it has fused with a transpose."""

    def nothing(helper):
        empty = helper.make_node("Slice", ["input", "none", "none", "last"], ["empty"])
        turned = helper.make_node("Transpose", ["empty"], ["turned"], perm=[1, 0])
        return [empty, turned, helper.make_node("MatMul", ["empty", "turned"], ["product"])]

    onnx = pytest.importorskip("onnx")
    model = onnx.load(earlier(exported("onnx"), "onnx", tmp_path / "old.onnx"))
    for name, value in (("none", 0), ("last", 1)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value], dtype=np.int64), name))
    name = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if o == name else o for o in node.output]
    model.graph.node.extend(nothing(onnx.helper))
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["product"], ["sum"], keepdims=0))
    model.graph.node.append(onnx.helper.make_node("Add", ["before", "sum"], [name]))
    onnx.save(model, tmp_path / "crafted.onnx")
    code = "import sys, numpy, favour; favour.load_exported(sys.argv[1])(numpy.zeros((1, 3), dtype='float32'))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, tmp_path / "crafted.onnx"], check=False)
    assert done.returncode in (0, 1)


def test_what_a_file_cannot_compute_is_an_error_of_ours(exported, monkeypatch):
    model = favour.load_exported(exported("pt2"))

    def fail(arrays):
        raise RuntimeError("bad allocation")

    monkeypatch.setattr(model, "_run", fail)
    with pytest.raises(FailedPrediction, match=r"net\.pt2.*bad allocation"):
        model(inputs())


def test_archives_may_name_only_what_is_admitted(exported, tmp_path):
    for target in (
        "empty.memory_format",
        "segment_reduce.default",
        "save.default",
        "randn.default",
        "as_strided.default",
    ):

        def change(name, content, target=target):
            if name != "models/model.json":
                return content.replace(b'"checksum": true, ', b"")
            described = json.loads(content)
            node = next(
                n
                for n in described["graph_module"]["graph"]["nodes"]
                if "aten.relu" in n["target"] or "linear" in n["target"]
            )
            node["target"] = f"torch.ops.aten.{target}"
            return json.dumps(described).encode()

        path = rewritten(exported("pt2"), tmp_path / "crafted.pt2", change)
        with pytest.raises(favour.errors.CorruptFile), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            favour.load_exported(path)


def test_archive_sizes_are_small_numbers():
    from favour.exporting.archive import check_size

    check_size("Mul(Integer(64), Symbol('s13', positive=True, integer=True))")
    check_size("Pow(Symbol('s13', positive=True, integer=True), Integer(2))")
    for bad in ("Pow(Integer(9), Pow(Integer(9), Integer(9)))", "Integer(" + "9" * 30 + ")", "Add(" * 500 + ")" * 500):
        with pytest.raises(favour.errors.CorruptFile, match="expression"):
            check_size(bad)


# ------------------------------------------------------------------ numbers outside tables

GOOD = torch.tensor([[0, 1, 2, 3], [19, 6, 8, 5], [3, 0, 0, -3]])
BAD = [[-1, 0, 0, 0], [20, 0, 0, 0], [0, 7, 0, 0], [0, -1, 0, 0], [0, 0, 9, 0], [0, 0, 0, 6], [0, 0, 0, -4]]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    torch.manual_seed(0)
    return favour.compile(Recommender().eval(), GOOD, check=False), tmp_path_factory.mktemp("tables")


def test_numbers_outside_tables_are_refused_by_predictors(tables):
    predict, folder = tables
    predict.save(folder / "p.favour")
    for model in (predict, favour.load(folder / "p.favour")):
        assert model(GOOD).mean.isfinite().all()
        for bad in BAD:
            with pytest.raises(favour.errors.InvalidValue, match="a table"):
                model(torch.tensor([bad, [0, 0, 0, 0]]))


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_numbers_outside_tables_are_refused_by_exported_models(form, tables):
    pytest.importorskip("onnxscript")
    predict, folder = tables
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = favour.load_exported(favour.export(predict, folder / f"m.{form}"))
    assert (model.inputs[0].least, model.inputs[0].most) == ([0, 0, 0, -3], [19, 6, 8, 5])
    with torch.no_grad():
        np.testing.assert_allclose(model(GOOD)["variance"], predict(GOOD).variance, rtol=1e-4)
    for bad in BAD:
        with pytest.raises(favour.errors.InvalidValue, match="in a table"):
            model([bad, [0, 0, 0, 0]])
    if form == "onnx":  # without favour: that row is NaN, the others are right
        session = pytest.importorskip("onnxruntime").InferenceSession(folder / "m.onnx")
        rows = np.array([*GOOD.tolist(), *BAD])
        for name, found in zip(("mean", "variance"), session.run(["mean", "variance"], {"x": rows}), strict=True):
            assert np.isnan(found[3:]).all()
            np.testing.assert_allclose(found[:3], model(GOOD)[name], rtol=1e-5)


def test_a_request_outside_tables_is_refused_by_the_server(tables):
    pytest.importorskip("prometheus_client")
    client = pytest.importorskip("fastapi.testclient")
    from favour.serving import create_app

    predict, folder = tables
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = favour.export(predict, folder / "served.pt2")
    with client.TestClient(create_app(path)) as server:
        for bad in BAD:
            assert server.post("/predict", json={"inputs": [bad]}).status_code == 422
        assert server.post("/predict", json={"inputs": GOOD.tolist()}).status_code == 200


# ------------------------------------------------------------------ many at once


def test_concurrent_saves_to_one_path_never_show_a_part(predict, tmp_path):
    path = tmp_path / "p.favour"
    predict.save(path)
    problems, done = [], threading.Event()

    def write():
        for _ in range(10):
            predict.save(path)

    def read():
        while not done.is_set():
            try:
                favour.load(path)
            except Exception as error:
                problems.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write) for _ in range(4)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not problems
    assert os.listdir(tmp_path) == ["p.favour"]


def test_models_are_compiled_and_predicted_in_threads(predict):
    x, problems, done = inputs(), [], threading.Event()
    with torch.no_grad():
        want = predict(x).covariance_matrix

    def work():
        for _ in range(2):
            model = network()
            try:
                got = favour.compile(model, torch.zeros(2, 3))
                with torch.no_grad():
                    torch.testing.assert_close(got(x).mean, model(x))
            except Exception as error:
                problems.append(error)

    def ask():
        while not done.is_set():
            with torch.no_grad():
                if not torch.equal(predict(x).covariance_matrix, want):
                    problems.append("another answer")

    threads = [threading.Thread(target=work) for _ in range(8)]
    asking = threading.Thread(target=ask)
    for thread in (asking, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    asking.join()
    assert not problems


def test_a_thread_that_compiles_takes_no_checks_from_another(predict, monkeypatch):
    """torch's own flag is the whole process's: here it is as a capture in another thread leaves it."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    model = network()
    answer = predict(inputs())
    assert torch.compiler.is_compiling()
    with pytest.raises(favour.errors.InvalidValue, match="NaN"):
        predict(torch.full((2, 3), float("nan")))
    monkeypatch.undo()
    drawn, follows = (favour.compile(model, inputs(), method=m, check=False) for m in ("sampling", "diag"))
    follows(inputs())
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    model[3].weight.data.mul_(5)
    drawn(inputs())
    found = follows(inputs()).variance
    monkeypatch.undo()
    torch.testing.assert_close(predict(inputs()).mean, answer.mean)
    torch.testing.assert_close(found, favour.compile(model, inputs(), method="diag", check=False)(inputs()).variance)


# ------------------------------------------------------------------ pickles


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS = {"pickle": through_pickle, "torch.save": through_torch, "copy": copy.deepcopy}


@pytest.mark.filterwarnings("ignore::favour.errors.PickledPredictor")
@pytest.mark.parametrize("way", WAYS)
def test_predictors_and_beliefs_are_copied(way, predict):
    x = inputs()
    fitted = favour.calibrate(predict, (torch.randn(50, 3), torch.randint(2, (50,))))
    for model in (predict, fitted):
        if way == "torch.save":
            with pytest.warns(favour.errors.PickledPredictor, match=r"predict\.save\(path\)"):
                twin = WAYS[way](model)
        else:
            twin = WAYS[way](model)
        assert type(twin) is type(model)
        torch.testing.assert_close(twin(x).covariance_matrix, model(x).covariance_matrix)
    for method in ("adjoint", "dplr", "diag"):
        belief = favour.compile(network(), torch.zeros(2, 3), method=method)(x)
        twin = WAYS[way](belief)
        torch.testing.assert_close(twin.covariance_matrix, belief.covariance_matrix)
        assert twin.mean is not belief.mean


def test_a_pickle_holds_no_code_of_the_model(predict):
    class Local(nn.Module):  # could not be pickled itself
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return self.body(x)

    model = favour.compile(Local().eval(), torch.zeros(2, 3))
    content = pickle.dumps(model)
    assert b"Local" not in content
    twin = pickle.loads(content)
    torch.testing.assert_close(twin(inputs()).mean, model(inputs()).mean)
    damaged = content.replace(b"aten.linear", b"aten.linxar", 1)
    with pytest.raises(favour.errors.CorruptFile, match="pickled predictor"):
        pickle.loads(damaged)


def test_a_copy_belongs_to_the_copied_model():
    model = network()
    both = copy.deepcopy({"model": model, "predict": favour.compile(model, torch.zeros(2, 3))})
    with torch.no_grad():
        both["model"][0].weight.mul_(2)
    torch.testing.assert_close(both["predict"](inputs()).mean, both["model"](inputs()))


def spread(model, x):
    with torch.no_grad():
        return model(x).stddev


@pytest.mark.slow
def test_predictors_travel_to_spawned_processes(predict):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(spread, (predict, inputs()))
    torch.testing.assert_close(found, spread(predict, inputs()))


# ------------------------------------------------------------------ the campaign, in small


def test_campaign_of_bad_files_in_small():
    """`benchmarks/campaigns/files.py` runs ten thousand of these; in processes of its own, since any may crash."""
    pytest.importorskip("onnxscript")
    source = Path(__file__).parents[2] / "benchmarks" / "campaigns" / "files.py"
    command = [sys.executable, str(source), "--quick", "--workers", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout[ran.stdout.index("{\n") :])
    assert found["trials"] == 120
    assert not any(found["bad"].values()), found["examples"]
    assert found["ended"]["flips .favour"] == {"refused": 17}
