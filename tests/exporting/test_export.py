"""Exported files against the predictor they were made from, and files that try to do more than predict."""

import io
import json
import pickle
import sys
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import favour
import favour.cli
from favour.errors import (
    CorruptFile,
    FavourError,
    InvalidType,
    InvalidValue,
    ReducedCovariance,
    ShapeMismatch,
    UnsupportedOperation,
)
from favour.exporting import archive, exported, plain
from favour.exporting.module import input_ports
from favour.nn import BayesLinear
from favour.passes.normalise.lookups import find_lookups

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")


def mlp():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 4)), (6,)


def lenet():
    """Its head is cheap beside its convolutions, so its probabilities come from draws of the head."""
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(72, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 3)), (1, 12, 12)


def mean_field():
    return nn.Sequential(BayesLinear(5, 10), nn.ReLU(), BayesLinear(10, 1)), (5,)


def plain_regression():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 1)), (5,)


def wide_mlp():
    """Closed forms and quadrature."""
    layers = [nn.Linear(784, 400), nn.ReLU(), nn.Dropout(0.2), nn.Linear(400, 400), nn.GELU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(400, 10)), (784,)


def lenet5():
    layers = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.1), nn.Conv2d(20, 50, 5), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(800, 500), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(500, 10)), (1, 28, 28)


def deep_mean_field():
    layers = [BayesLinear(20, 64), nn.Tanh(), BayesLinear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers, BayesLinear(64, 10)), (20,)


NETWORKS = {"mlp": mlp, "lenet": lenet, "mean-field": mean_field}
LARGE = {"wide-mlp": wide_mlp, "lenet5": lenet5, "deep-mean-field": deep_mean_field}
ALL = NETWORKS | LARGE | {"plain": plain_regression}


@cache
def predictor(name):
    torch.manual_seed(0)
    model, shape = ALL[name]()
    return favour.compile(model, torch.randn(2, *shape)), shape


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every network in both formats, written once and on demand."""
    folder = tmp_path_factory.mktemp("exported")

    @cache
    def write(name, form):
        return favour.export(predictor(name)[0], folder / f"{name}.{form}")

    return write


def reference(predict, x, classes):
    """The named outputs, from the predictor itself."""
    belief = predict(x)
    named = {"mean": belief.mean, "variance": belief.variance}
    if classes:
        named |= {"probabilities": predict.probabilities(x), "jsd": predict.jsd(x)}
        return named | {"covariance": belief.covariance_matrix}
    low, high = belief.confidence_interval(0.95)
    return named | {"stddev": belief.stddev, "lower": low, "upper": high}


def test_a_belief_without_columns_and_scores_by_nodes(tmp_path):
    """Products with no columns kill onnxruntime; bounds of two types stopped torch's translation."""
    torch.manual_seed(0)
    pictures = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(288, 4))
    for method, model, shape in (("diag", mlp()[0], mlp()[1]), ("adjoint", pictures, (1, 8, 8))):
        predict = favour.compile(model.eval(), torch.randn(2, *shape), method=method, check=False)
        x = torch.randn(1, *shape)
        have = favour.load_exported(favour.export(predict, tmp_path / f"{method}.onnx", check=False), threads=1)(x)
        with torch.no_grad():
            want = reference(predict, x, True)
        for key in ("variance", "jsd", "covariance"):
            np.testing.assert_allclose(have[key], want[key], rtol=2e-3, atol=1e-6)


SLOW = [
    (name, form)
    for name in ALL
    for form in ("onnx", "pt2")
    if name in LARGE or (name == "mean-field" and form == "pt2")
]
QUICK = [("mlp", "onnx"), ("mlp", "pt2"), ("lenet", "onnx"), ("lenet", "pt2"), ("mean-field", "onnx")]


@pytest.mark.parametrize(("name", "form"), [*QUICK, *(pytest.param(*p, marks=pytest.mark.slow) for p in SLOW)])
def test_results_equal_the_predictor(files, name, form):
    """One file, batches of 1, 3 and 64."""
    predict, shape = predictor(name)
    model = favour.load_exported(files(name, form), threads=1)
    for rows in (1, 3, 64):
        x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            want = reference(predict, x, name != "mean-field")
        have = model(x)
        assert list(have) == list(want)
        for key, tensor in want.items():
            scale = tensor.abs().max()
            assert have[key].shape == tuple(tensor.shape)
            # Rare events weigh in the divergence: rounding of the logits shows there first.
            rtol = 1e-3 if key == "jsd" else 1e-4
            torch.testing.assert_close(torch.from_numpy(have[key]) / scale, tensor / scale, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_nothing_is_random(files, form):
    model = favour.load_exported(files("mlp", form))
    x = np.random.default_rng(0).normal(size=(5, 6))
    first, second, alone = model(x), model(x), model(x[2:3])
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(alone[name][0], first[name][2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_adaptive_average_pools_leave_for_onnx(size, tmp_path):
    """Windows that tile the image, and (3 of 4) that overlap."""
    layers = [nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(size), nn.Flatten(), nn.Linear(2 * size**2, 2)]
    predict = favour.compile(nn.Sequential(*layers), torch.randn(2, 2, 4, 4), check=False)
    favour.export(predict, tmp_path / "pooled.onnx", kind="regression")  # compares


def test_a_small_divergence_is_held_to_the_rounding_of_entropies(tmp_path):
    """Logits that hardly move: the JSD is a difference of entropies, of which float32 leaves few digits."""
    layers = [nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 3)]
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[-1].weight.mul_(0.01)
    predict = favour.compile(model, torch.randn(2, 4), check=False)
    favour.export(predict, tmp_path / "small.pt2")


def test_onnx_graph_has_no_generator_and_no_foreign_operators(files):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(files("lenet", "onnx"))
    operators = {node.op_type for node in model.graph.node}
    assert not [name for name in operators if "Random" in name or name in ("Bernoulli", "Multinomial", "Dropout")]
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert "Cholesky" not in operators
    text = str([(p.key, p.value) for n in model.graph.node for p in n.metadata_props])
    assert str(Path(__file__).parents[2]) not in text  # no paths of this machine
    onnx.checker.check_model(model)


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_description(files, form):
    model = favour.load_exported(files("lenet", form))
    assert (model.kind, model.link, model.classes, model.labels, model.level) == (
        "classification",
        "softmax",
        3,
        None,
        None,
    )
    assert [(p.dtype, p.shape) for p in model.inputs] == [("float32", (None, 1, 12, 12))]
    assert model.example_shape == (1, 12, 12) and model.format == form
    shapes = {p.name: p.shape for p in model.outputs}
    assert shapes["jsd"] == (None,) and shapes["covariance"] == (None, 3, 3)
    assert all(p.meaning for p in model.outputs) and "lenet" in repr(model)
    regression = favour.load_exported(files("plain", form))
    assert (regression.kind, regression.link, regression.classes, regression.level) == ("regression", None, None, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_transformer_with_two_inputs(tmp_path, form):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, num_labels=3, vocab_size=20, max_position_embeddings=8)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    example = {"input_ids": torch.randint(0, 20, (3, 5)), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    predict = favour.compile(model, example)
    loaded = favour.load_exported(favour.export(predict, tmp_path / f"bert.{form}"))
    assert [(p.name, p.dtype) for p in loaded.inputs] == [("input_ids", "int64"), ("attention_mask", "int64")]
    with torch.no_grad():
        belief = predict(**example)["logits"]
    have = loaded(**{k: v.numpy() for k, v in example.items()})
    np.testing.assert_allclose(have["variance"], belief.variance, rtol=1e-4)
    np.testing.assert_allclose(have["probabilities"], favour.probabilities(belief), rtol=1e-4)


def test_noise_level_and_kind(tmp_path):
    predict, shape = predictor("plain")
    x = torch.randn(4, *shape)
    model = favour.load_exported(favour.export(predict, tmp_path / "a.pt2", noise=2.0, level=0.5))
    with torch.no_grad():
        belief = predict(x).with_noise(2.0)
    np.testing.assert_allclose(model(x)["variance"], belief.variance, rtol=1e-4)
    np.testing.assert_allclose(model(x)["upper"], belief.confidence_interval(0.5)[1], rtol=1e-4)
    binary = favour.load_exported(favour.export(predict, tmp_path / "b.pt2", kind="binary", labels=["no", "yes"]))
    assert binary.labels == ["no", "yes"] and binary.classes == 2
    with torch.no_grad():
        np.testing.assert_allclose(binary(x)["probabilities"], predict.probabilities(x, kind="binary"), rtol=1e-4)
        np.testing.assert_allclose(binary(x)["jsd"], predict.jsd(x, kind="binary"), rtol=1e-3)


def test_calibrated_predictor(tmp_path):
    predict, shape = predictor("mlp")
    fitted = favour.calibrate(predict, (torch.randn(60, *shape), torch.randint(4, (60,))))
    model = favour.load_exported(favour.export(fitted, tmp_path / "fitted.pt2"))
    x = torch.randn(3, *shape)
    with torch.no_grad():
        np.testing.assert_allclose(model(x)["probabilities"], fitted.probabilities(x), rtol=1e-4)
        np.testing.assert_allclose(model(x)["jsd"], fitted.jsd(x), rtol=1e-3)


def test_examples_leave_means_ranges_and_scores(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    x = 3 + torch.randn(300, 4)
    np.save(tmp_path / "x.npy", x.numpy())
    favour.compile(net, x[:2]).save(tmp_path / "net.favour")
    words = [str(tmp_path / "net.favour"), "--out", str(tmp_path / "net.pt2"), "--examples", str(tmp_path / "x.npy")]
    result = CliRunner().invoke(favour.cli.build(), ["export", *words])
    assert result.exit_code == 0, result.output
    model = favour.load_exported(tmp_path / "net.pt2")
    (about,) = model.seen["inputs"]
    assert model.seen["rows"] == 300
    for name, wanted in (("mean", x.mean(0)), ("stddev", x.std(0, correction=0)), ("low", x.amin(0))):
        torch.testing.assert_close(torch.tensor(about[name]), wanted, rtol=1e-3, atol=1e-4)
    jsd, answer = model.seen["scores"]["jsd"], model(x)
    assert len(jsd) == 101 and jsd[50] == pytest.approx(np.quantile(answer["jsd"], 0.5), rel=1e-3)
    p = answer["probabilities"]
    assert model.seen["scores"]["entropy"][100] == pytest.approx(-(p * np.log(p)).sum(1).min(), rel=1e-3)

    regression = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    favour.export(favour.compile(regression, x[:2]), tmp_path / "r.pt2", examples=(x,), check=False)
    assert list(favour.load_exported(tmp_path / "r.pt2").seen["scores"]) == ["stddev"]
    with pytest.raises(InvalidValue, match="`examples` has 1 rows"):
        favour.export(favour.compile(regression, x[:2]), tmp_path / "r.pt2", examples=x[:1])
    with pytest.raises(ShapeMismatch):
        favour.export(favour.compile(regression, x[:2]), tmp_path / "r.pt2", examples=x[:, :3])
    for damaged in ({"rows": 1}, {"rows": 1, "inputs": [{"mean": ["a"]}], "scores": {}}, 3):
        with pytest.raises((ValueError, KeyError, TypeError)):
            exported._seen(damaged)


def test_export_leaves_the_predictor_alone(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2))
    predict = favour.compile(net, torch.zeros(2, 3), memory=2**20)
    x = torch.randn(3, 3)
    before = predict(x).covariance_matrix
    model = favour.load_exported(favour.export(predict, tmp_path / "net.pt2"))
    with torch.no_grad():
        net[0].weight.mul_(2.0)
    assert predict.numerics.memory == 2**20
    assert not torch.allclose(predict(x).covariance_matrix, before)  # still follows the model
    np.testing.assert_allclose(model(x)["covariance"], before.detach(), rtol=1e-4)  # the file does not


# ------------------------------------------------------------------ what is refused


def test_arguments_are_checked(tmp_path):
    predict, _ = predictor("mlp")
    for wrong, words in (
        ({"path": "model.h5"}, "end in .onnx or .pt2"),
        ({"path": tmp_path / "no" / "model.onnx"}, "no folder"),
        ({"kind": "poisson"}, "choose one of"),
        ({"kind": "binary"}, "event"),
        ({"labels": ["a"]}, "1 names"),
        ({"level": 2.0}, "level"),
        ({"noise": 1.0}, "classes have none"),
        ({"output": "logits"}, "no uncertain output"),
    ):
        with pytest.raises(FavourError, match=words):
            favour.export(predict, **({"path": tmp_path / "m.pt2"} | wrong))
    with pytest.raises(InvalidType, match="takes a predictor"):
        favour.export(nn.Linear(2, 2), tmp_path / "m.pt2")
    certain = favour.compile(nn.Linear(2, 2), torch.zeros(2, 2))
    with pytest.raises(UnsupportedOperation, match="neither dropout nor a posterior"):
        favour.export(certain, tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_inputs_are_checked(files, form):
    model = favour.load_exported(files("mlp", form))
    good = np.zeros((2, 6), np.float32)
    for wrong, kind, words in (
        (np.zeros((2, 5)), ShapeMismatch, r"\(2, 5\).*\(batch, 6\)"),
        (np.zeros(6), ShapeMismatch, "batch axis"),
        ([[1.0, 2.0], [1.0]], ShapeMismatch, "ragged"),
        (np.full((2, 6), np.nan), InvalidValue, "2 of 2 rows"),
        (np.full((2, 6), 1e200), InvalidValue, "too large"),
        ([["a"] * 6], InvalidType, "not numbers"),
    ):
        with pytest.raises(kind, match=words):
            model(wrong)
    with pytest.raises(InvalidType, match="1 input"):
        model(good, good)
    with pytest.raises(InvalidType, match="nothing"):
        model(nothing=good)


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return Path.write_text, (Path(self.mark), "ran")


def changed(path, target, change):
    """A copy of an archive with one member replaced, and without a checksum, as earlier versions wrote none."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for item in old.infolist():
            content = old.read(item)
            inner = item.filename.split("/", 1)[1]
            new.writestr(item.filename, change(inner, content.replace(b'"checksum": true, ', b"")))
    return target


def test_pickle_named_pt2_is_refused(tmp_path):
    mark = tmp_path / "mark"
    for name, payload in (
        ("plain", pickle.dumps(Malicious(mark))),
        ("torch", None),
    ):
        path = tmp_path / f"{name}.pt2"
        torch.save(Malicious(mark), path) if payload is None else path.write_bytes(payload)
        with pytest.raises(CorruptFile):
            favour.load_exported(path)
    assert not mark.exists()


ATTACKS = {
    "sample inputs": ("data/sample_inputs/model.pt", "pickle"),
    "weight": ("data/weights/model_weights_config.json", "weight"),
    "constant": ("data/constants/model_constants_config.json", "constant"),
    "expression": ("models/model.json", "expression"),
    "call": ("models/model.json", "call"),
    "file operation": ("models/model.json", "file"),
    "name": ("models/model.json", "name"),
    "enum": ("models/model.json", "enum"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_inside_an_archive_is_refused(files, tmp_path, attack):
    """Each of these makes torch.export.load, or the module it returns, do something other than predict."""
    member, how = ATTACKS[attack]
    mark = tmp_path / "mark"
    buffer = io.BytesIO()
    torch.save(Malicious(mark), buffer)
    touched = []

    def change(name, content):
        if how in ("weight", "constant") and name == f"data/{how}s/{'weight_0' if how == 'weight' else 'opaque_obj_0'}":
            return buffer.getvalue()
        if name != member:
            return content
        touched.append(name)
        if how == "pickle":
            return buffer.getvalue()
        described = json.loads(content)
        code = f"__import__('pathlib').Path({str(mark)!r}).write_text('ran')"
        if how == "weight":
            next(iter(described["config"].values()))["use_pickle"] = True
        elif how == "constant":
            described["config"]["x"] = {
                "path_name": "opaque_obj_0",
                "is_param": False,
                "use_pickle": True,
                "tensor_meta": None,
            }
        elif how == "expression":
            text = json.dumps(described)
            start = text.index('"expr_str": "') + len('"expr_str": "')
            return (text[:start] + code + text[text.index('"', start) :]).encode()
        elif how == "enum":
            signature = described["graph_module"]["module_call_graph"][0]["signature"]
            spec = json.loads(signature["in_spec"])
            spec[1]["context"] = json.dumps({"__enum__": True, "fqn": "antigravity:X", "name": "Y"})
            signature["in_spec"] = json.dumps(spec)
        else:
            node = described["graph_module"]["graph"]["nodes"][3]
            if how == "call":
                node["target"] = "torch.os.system"
            elif how == "file":
                node["target"] = "torch.ops.aten.from_file.default"
            else:
                described["graph_module"]["graph"]["inputs"][-1]["as_tensor"]["name"] = f"x={code}"
        return json.dumps(described).encode()

    bad = changed(files("plain", "pt2"), tmp_path / "bad.pt2", change)
    assert touched
    with pytest.raises(CorruptFile, match="refused"):
        favour.load_exported(bad)
    assert not mark.exists() and "antigravity" not in sys.modules


def test_unchanged_copy_passes(files, tmp_path):
    """The attacks are refused for what they change, not for being copies."""
    copy = changed(files("plain", "pt2"), tmp_path / "copy.pt2", lambda name, content: content)
    assert favour.load_exported(copy).kind == "regression"


def test_strange_member_is_refused(files, tmp_path):
    path = changed(files("plain", "pt2"), tmp_path / "more.pt2", lambda name, content: content)
    with zipfile.ZipFile(path, "a") as file:
        root = file.namelist()[0].split("/")[0]
        file.writestr(f"{root}/data/aotinductor/model/run.so", b"\x7fELF")
    with pytest.raises(CorruptFile, match=r"run\.so"):
        favour.load_exported(path)


def test_size_expressions():
    assert archive._SIZE.fullmatch("Mul(Integer(64), Symbol('s13', positive=True, integer=True))")
    for bad in (
        "().__class__",
        "Symbol('a b')",
        "exec('x')",
        "Symbol.__init__",
        "lambda: 1",
        "open('x')",
        "[1]",
        "1.0j",
    ):
        assert not archive._SIZE.fullmatch(bad), bad


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_damaged_files_are_refused(files, tmp_path, form):
    whole = Path(files("plain", form)).read_bytes()
    for name, content in (("cut", whole[: len(whole) // 2]), ("noise", bytes(range(256)) * 20), ("empty", b"")):
        path = tmp_path / f"{name}.{form}"
        path.write_bytes(content)
        with pytest.raises(CorruptFile, match=name):
            favour.load_exported(path)


def test_foreign_files_are_refused(tmp_path):
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info("x", 1, [None, 2])
    out = onnx.helper.make_tensor_value_info("y", 1, [None, 2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "relu.onnx")
    with pytest.raises(CorruptFile, match="no description by favour"):
        favour.load_exported(tmp_path / "relu.onnx")
    onnx.helper.set_model_props(model, {"favour": json.dumps({"format": 99})})
    onnx.save(model, tmp_path / "new.onnx")
    with pytest.raises(CorruptFile, match="Upgrade favour"):
        favour.load_exported(tmp_path / "new.onnx")
    with pytest.raises(InvalidValue, match="no file"):
        favour.load_exported(tmp_path / "none.onnx")
    (tmp_path / "model.txt").write_text("x")
    with pytest.raises(InvalidValue, match="neither"):
        favour.load_exported(tmp_path / "model.txt")


# ------------------------------------------------------------------ factorisations written out


def matrices(n):
    generator = torch.Generator().manual_seed(n)
    a = torch.randn(5, n, n + 2, generator=generator, dtype=torch.float64)
    return a @ a.mT, torch.randn(5, n, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_written_out_factorisations(n):
    a, b = matrices(n)
    lower = torch.linalg.cholesky(a)
    torch.testing.assert_close(plain.cholesky_ex(a).L, lower)
    torch.testing.assert_close(plain.cholesky_ex(a, upper=True).L, lower.mT)
    for upper in (False, True):
        triangle = lower.mT if upper else lower
        for left in (False, True):
            for unit in (False, True):
                options = {"upper": upper, "left": left, "unitriangular": unit}
                given = b if left else b.mT
                want = torch.linalg.solve_triangular(triangle, given, **options)
                torch.testing.assert_close(plain.solve_triangular(triangle, given, **options), want)
    tall = torch.cat([a, a[:, :1] * 2], 1)
    q, r = plain.qr(tall)
    torch.testing.assert_close(q @ r, tall)
    torch.testing.assert_close(r.mT @ r, tall.mT @ tall)


def test_written_out_erfc_is_relatively_accurate():
    x = torch.linspace(-4, 8, 200)
    torch.testing.assert_close(plain.erfc(x), torch.special.erfc(x.double()).float(), rtol=2e-5, atol=0)


def test_too_large_a_factorisation_says_what_to_do():
    with pytest.raises(UnsupportedOperation, match="at most 128"):
        plain.cholesky_ex(torch.eye(129).expand(1, 129, 129))


def test_simplified_graph_is_smaller_and_equal():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            squared = self.weight.square()
            return x @ squared + (x @ self.weight.square()).relu() * torch.ones(3).sum()

    net, x = Net(), torch.randn(2, 3)
    module = torch.export.export(net, (x,)).module(check_guards=False)
    before = len(module.graph.nodes)
    module = plain.simplified(module)
    targets = [str(n.target) for n in module.graph.nodes]
    assert len(targets) < before and not [t for t in targets if "square" in t or "pow" in t]
    assert sum("matmul" in t for t in targets) == 1
    torch.testing.assert_close(module(x), net(x))


# ------------------------------------------------------------------ command line

FACTORY = """
import torch
def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 2))
constant = 3
def text():
    return "no model"
"""


def run(*arguments):
    return CliRunner().invoke(favour.cli.build(), ["export", *map(str, arguments)])


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "my_exported_nets.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_exported_nets", None)


def test_command_exports_a_saved_predictor(tmp_path):
    predictor("plain")[0].save(tmp_path / "saved.favour")
    result = run(tmp_path / "saved.favour", "--out", tmp_path / "m.pt2", "--level", "0.9")
    assert result.exit_code == 0, result.output
    assert "regression" in result.output and "interval" in result.output
    assert favour.load_exported(tmp_path / "m.pt2").level == 0.9


def test_command_exports_a_factory_with_weights(project):
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    safetensors.save_file(net.state_dict(), "weights.safetensors")
    name = "my_exported_nets:net"
    result = run(name, "--weights", "weights.safetensors", "--shape", "3", "--out", "m.pt2", "--labels", "cat, dog")
    assert result.exit_code == 0, result.output
    model, x = favour.load_exported("m.pt2"), torch.randn(2, 3)
    assert model.labels == ["cat", "dog"]
    np.testing.assert_allclose(model(x)["mean"], net.eval()(x).detach(), rtol=1e-4, atol=1e-6)


def test_command_errors_are_actionable(project):
    torch.save(Malicious(project / "mark"), "pickled.safetensors")
    torch.save(Malicious(project / "mark"), "saved.favour")
    name = "my_exported_nets:net"
    for arguments, words in (
        ((name, "--out", "m.pt2"), "--shape"),
        ((name, "--shape", "a", "--out", "m.pt2"), "whole numbers"),
        ((name, "--shape", "3", "--dtype", "float33", "--out", "m.pt2"), "float33"),
        (("my_exported_nets:other", "--shape", "3", "--out", "m.pt2"), "it has net, text"),
        (("my_exported_nets:constant", "--shape", "3", "--out", "m.pt2"), "function"),
        (("my_exported_nets:text", "--shape", "3", "--out", "m.pt2"), "returned a str"),
        (("no_such_module:net", "--shape", "3", "--out", "m.pt2"), "no module"),
        (("missing.favour", "--out", "m.pt2"), "no file"),
        ((name, "--weights", "pickled.safetensors", "--shape", "3", "--out", "m.pt2"), "hold code"),
        ((name, "--weights", "none.safetensors", "--shape", "3", "--out", "m.pt2"), "no file"),
        (("saved.favour", "--out", "m.pt2"), "holds code"),
        ((name, "--shape", "3", "--out", "m.bin"), "end in"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, FavourError), (arguments, result.exception)
        assert words in str(result.exception), result.exception
    assert not (project / "mark").exists() and not (project / "m.pt2").exists()


@pytest.mark.parametrize("hidden", [2, 4, 8])
def test_a_classifier_with_fewer_hidden_units_than_classes_is_exported(tmp_path, hidden):
    """Its covariance is singular, and rounding makes some pivots negative."""
    layers = [nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10)]
    predict = favour.compile(nn.Sequential(*layers), torch.randn(4, 64))
    model = favour.load_exported(favour.export(predict, tmp_path / "net.onnx", labels=[str(i) for i in range(10)]))
    x = torch.randn(300, 64)
    torch.testing.assert_close(
        torch.from_numpy(model(x)["probabilities"]), predict.probabilities(x).detach(), rtol=1e-4, atol=1e-5
    )


def test_pictures_leave_without_their_draws_and_say_so(tmp_path):
    """A graph has no random numbers: the sweep of variances is written, with a warning; draws by hand are refused."""
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 2, 3, padding=1)
    ).double()
    x = torch.randn(2, 1, 48, 48, dtype=torch.float64)
    predict = favour.compile(net, x)
    assert predict.method.name == "pooled"
    with pytest.warns(ReducedCovariance, match=r"method='diag'"):
        model = favour.load_exported(favour.export(predict, tmp_path / "net.pt2"))
    with torch.no_grad():
        want = favour.compile(net, x, method="diag")(x)
    have = model(x)
    np.testing.assert_allclose(have["mean"], want.mean, rtol=1e-9)
    np.testing.assert_allclose(have["variance"], want.variance, rtol=1e-9)
    with pytest.raises(UnsupportedOperation, match="random numbers"):
        favour.export(favour.compile(net, x, method="pooled"), tmp_path / "other.pt2")


def test_a_wrapped_output_is_scored_in_the_file_as_by_its_predictor(tmp_path):
    """A model may return its logits in a dict: JSD and probabilities are of the head's draws all the same."""

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = lenet()[0]

        def forward(self, x):
            return {"logits": self.body(x)}

    net, x = Wrapped().double(), torch.randn(5, 1, 12, 12, dtype=torch.float64)
    predict = favour.compile(net, x)
    file = favour.load_exported(favour.export(predict, tmp_path / "net.pt2"))(x)
    np.testing.assert_allclose(file["jsd"], predict.jsd(x).detach(), rtol=1e-6)
    np.testing.assert_allclose(file["jsd"], favour.scores.jsd(predict(x)["logits"]).detach(), rtol=1e-6)
    np.testing.assert_allclose(file["probabilities"], predict.probabilities(x).detach(), rtol=1e-6)


def test_a_row_chosen_by_sizes_alone_bounds_no_input():
    """As token types that are zeros of the input's shape: their table of two rows says nothing of words."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.types = nn.Embedding(20, 8), nn.Embedding(2, 8)
            self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3))

        def forward(self, ids):
            return self.head((self.words(ids) + self.types(torch.zeros_like(ids))).mean(1))

    predict = favour.compile(Two(), torch.randint(0, 20, (3, 5)))
    (port,) = input_ports(predict, find_lookups(predict.graph))
    assert (port.least, port.most) == (0, 19) or (port.least, port.most) == ([0] * 5, [19] * 5)
