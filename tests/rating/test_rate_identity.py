"""Rating: an unfinished run is continued with the same model, data, options and versions, and with nothing else."""

import os
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from test_rate import FEATURES, network, rows, write_parquet
from test_rate_files import SETTINGS, interrupted, read, refused, snapshot
from test_scale import started
from torch import nn

import favour
from favour.errors import InvalidValue
from favour.rating import fingerprint, identity, models, rate

MODELS = """
import torch
from torch import nn

scale, activation, variance, rate, buffer = 1.0, torch.relu, 0.25, 0.3, 0.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.drop, self.second = nn.Linear(4, 16), nn.Dropout(rate), nn.Linear(16, 3)
        self.second.weight.data.mul_(scale)
        self.register_buffer("shift", torch.full((3,), buffer), persistent=False)

    def forward(self, x):
        return self.second(self.drop(activation(self.first(x)))) + self.shift


def net():
    return Net()


def pair():
    model = nn.Sequential(nn.Linear(4, 3))
    nn.init.constant_(model[0].weight, scale)
    nn.init.zeros_(model[0].bias)
    return model, {"0.weight": torch.full((3, 4), variance)}


def drawn():
    torch.seed()
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 3))
"""


@pytest.fixture
def data(tmp_path):
    return write_parquet(tmp_path / "x.parquet", rows(40), row_group_size=10)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The module of the user's that makes models."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "changing_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("changing_models", None)
    import changing_models

    yield changing_models
    sys.modules.pop("changing_models", None)


@pytest.mark.parametrize(
    "form, function, name, value",
    [
        ("out.parquet", "net", "scale", 2.0),
        ("out.csv", "net", "activation", torch.tanh),
        ("out", "net", "rate", 0.4),
        ("out.parquet", "net", "buffer", 1.0),
        ("out.csv", "pair", "scale", 2.0),
        ("out", "pair", "variance", 1.0),
    ],
)
def test_another_model_of_the_same_function_is_refused(tmp_path, data, made, monkeypatch, form, function, name, value):
    out, model = tmp_path / form, f"changing_models:{function}"
    interrupted(data, model, out)
    with monkeypatch.context() as patch:
        patch.setattr(made, name, value)
        refused(tmp_path, data, model, out, match=r"these changed: model\. ", **SETTINGS)
    done = rate(data, model, out, **SETTINGS)
    assert (done.rows, done.resumed) == (40, 10)
    rate(data, model, tmp_path / "whole.parquet", **SETTINGS)
    got, wanted = read(out), pq.read_table(tmp_path / "whole.parquet")
    np.testing.assert_allclose(got["stddev"].to_numpy(), wanted["stddev"].to_numpy(), rtol=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(made, name, value)
        refused(tmp_path, data, model, out, match=r"a rating with other arguments; these changed: model\. ", **SETTINGS)


def test_a_pair_of_objects_counts_its_posterior(tmp_path, data):
    model = nn.Sequential(nn.Linear(FEATURES, 3))
    small, large = ({"0.weight": torch.full((3, FEATURES), v)} for v in (0.25, 1.0))
    interrupted(data, (model, small), tmp_path / "out.parquet")
    refused(tmp_path, data, (model, large), tmp_path / "out.parquet", match=r"these changed: model\.", **SETTINGS)
    with torch.no_grad():
        model[0].bias += 1
    refused(tmp_path, data, (model, small), tmp_path / "out.parquet", match=r"these changed: model\.", **SETTINGS)
    with torch.no_grad():
        model[0].bias -= 1
    assert len({models.digest((model, small)), models.digest((model, large)), models.digest(model)}) == 3


def test_other_weights_are_refused(tmp_path, data):
    for name, factor in (("w", 1.0), ("v", 2.0)):
        tensors = {k: (factor * v).contiguous() for k, v in network(3).state_dict().items()}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    out = tmp_path / "out.parquet"
    interrupted(data, "test_rate:network", out, weights=tmp_path / "w.safetensors")
    other = {**SETTINGS, "weights": tmp_path / "v.safetensors"}
    refused(tmp_path, data, "test_rate:network", out, match=r"these changed: model\.", **other)
    os.replace(tmp_path / "v.safetensors", tmp_path / "w.safetensors")
    same = {**SETTINGS, "weights": tmp_path / "w.safetensors"}
    refused(tmp_path, data, "test_rate:network", out, match=r"these changed: model\.", **same)


def test_a_model_that_is_drawn_anew_says_what_to_do(tmp_path, data, made):
    out = tmp_path / "out.parquet"
    interrupted(data, "changing_models:drawn", out)
    refused(tmp_path, data, "changing_models:drawn", out, match="give `weights`, or a seed", **SETTINGS)


@pytest.mark.parametrize("form", ["predictor", "pt2", "onnx"])
@pytest.mark.filterwarnings("ignore")
def test_another_file_of_the_same_name_is_refused(tmp_path, data, form):
    suffix = "favour" if form == "predictor" else form
    for name, factor in (("a", 1.0), ("b", 2.0)):
        net = network(3)
        with torch.no_grad():
            net[3].weight *= factor
        predict = favour.compile(net, torch.zeros(2, FEATURES))
        path = tmp_path / f"{name}.{suffix}"
        predict.save(path) if form == "predictor" else favour.export(predict, path)
    interrupted(data, tmp_path / f"a.{suffix}", tmp_path / "out.parquet")
    os.replace(tmp_path / f"b.{suffix}", tmp_path / f"a.{suffix}")
    model = tmp_path / f"a.{suffix}"
    refused(tmp_path, data, model, tmp_path / "out.parquet", match=r"these changed: model\.", **SETTINGS)


def test_digests_are_the_same_in_another_process(tmp_path, data, made):
    """Or nothing would ever be continued."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from favour.rating import loop\n"
        "for name in ('net', 'pair'):\n"
        "    with loop.prepared(sys.argv[2], f'changing_models:{name}', sys.argv[3] + name,"
        " loop.Options(id='key', batch_size=10)) as ready:\n"
        "        print(ready.manifest['identity']['model'])\n"
    )
    arguments = (str(tmp_path / "code"), str(data), str(tmp_path / "out-"))
    digests = []
    for _ in range(2):
        process = started("-c", code, *arguments, stdout=-1, stderr=-1)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        digests.append(output.split())
    assert digests[0] == digests[1] and len(set(digests[0])) == 2


# ---- data


@pytest.mark.parametrize("change", ["content", "rows", "time", "another file", "order"])
def test_changed_data_are_refused(tmp_path, change):
    predict = favour.compile(network(3), torch.zeros(2, FEATURES))
    x = rows(40)
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", x)
    out, given = tmp_path / "out.parquet", [str(tmp_path / "a.npy"), str(tmp_path / "b.npy")]
    settings = {"part_rows": 10, "batch_size": 10, "id": None}
    interrupted(given, predict, out, **settings)
    before = os.stat(given[0])
    if change == "content":  # of the same size, and the same time
        x[20] += 1
        np.save(given[0], x)
        os.utime(given[0], ns=(before.st_atime_ns, before.st_mtime_ns))
        assert os.stat(given[0]).st_mtime_ns == before.st_mtime_ns and os.stat(given[0]).st_size == before.st_size
    elif change == "rows":
        np.save(given[0], x[:39])
    elif change == "time":
        os.utime(given[0], ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "another file":
        given = given[:1]
    else:
        given = given[::-1]
    refused(tmp_path, given, predict, out, match=r"these changed: data\. ", **settings)


@pytest.mark.parametrize("hidden", [False, True])
def test_data_written_to_while_they_are_rated(tmp_path, hidden):
    """Found at the next part, or, where size and time stay the same, in the end; never in a result."""
    predict = favour.compile(network(3), torch.zeros(2, FEATURES))
    x = rows(40)
    np.save(tmp_path / "x.npy", x)
    before = os.stat(tmp_path / "x.npy")

    def change(done: int, bad: int, total: int) -> None:
        if done == 20:
            np.save(tmp_path / "y.npy", x + 1)
            os.replace(tmp_path / "y.npy", tmp_path / "x.npy")
            if hidden:
                os.utime(tmp_path / "x.npy", ns=(before.st_atime_ns, before.st_mtime_ns))

    settings = {"part_rows": 10, "batch_size": 10}
    with pytest.raises(InvalidValue, match="written to while"):
        rate(tmp_path / "x.npy", predict, tmp_path / "out.parquet", progress=change, **settings)
    assert not (tmp_path / "out.parquet").exists()
    refused(tmp_path, tmp_path / "x.npy", predict, tmp_path / "out.parquet", match=r"these changed: data\.", **settings)
    assert rate(tmp_path / "x.npy", predict, tmp_path / "out.parquet", overwrite=True, **settings).resumed == 0
    rate(tmp_path / "x.npy", predict, tmp_path / "whole.parquet", **settings)
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


def test_fingerprints_of_large_files_read_some_of_it(tmp_path, monkeypatch):
    content = np.random.default_rng(0).integers(0, 256, 2**18, np.uint8)
    content.tofile(tmp_path / "x")
    whole = fingerprint.content_digest(tmp_path / "x")
    some = fingerprint.content_digest(tmp_path / "x", 2**16)
    assert whole != some == fingerprint.content_digest(tmp_path / "x", 2**16)
    for at in (0, 2**18 - 1):  # the first and the last block are always read
        content[at] ^= 1
        content.tofile(tmp_path / "x")
        assert fingerprint.content_digest(tmp_path / "x", 2**16) != some
        content[at] ^= 1
    monkeypatch.setattr(fingerprint, "WHOLE", 2**17)
    assert fingerprint.files_digest([str(tmp_path / "x")]) != fingerprint.files_digest([str(tmp_path / "x")] * 2)
    with pytest.raises(InvalidValue, match="cannot be read"):
        fingerprint.files_digest([str(tmp_path / "nothing")])


# ---- settings, versions


@pytest.mark.parametrize("name", ["favour", "torch", "onnxruntime", "pillow"])
def test_versions_are_part_of_a_run(tmp_path, data, monkeypatch, name):
    predict = favour.compile(network(3), torch.zeros(2, FEATURES))
    out = tmp_path / "out.parquet"
    interrupted(data, predict, out)
    before = identity.versions

    def other(rater, kind=""):
        return {**before(rater, kind), name: "0.0.1"}

    monkeypatch.setattr(identity, "versions", other)
    refused(tmp_path, data, predict, out, match=rf"version of {name} \(was .*, is 0\.0\.1\)", **SETTINGS)


def test_versions_are_those_that_count():
    assert set(identity.versions(models.Rater())) == {"favour", "torch"}
    rater = models.Rater()
    rater.runtime = "onnx"
    assert set(identity.versions(rater, "images")) == {"favour", "torch", "onnxruntime", "pillow"}


@pytest.mark.parametrize(
    "name, value", [("every_class", True), ("part_rows", 20), ("batch_size", 5), ("columns", ["f3", "f2", "f1", "f0"])]
)
def test_other_settings_are_refused_by_name(tmp_path, data, name, value):
    predict = favour.compile(network(3), torch.zeros(2, FEATURES))
    out = tmp_path / "out.parquet"
    interrupted(data, predict, out)
    before = snapshot(tmp_path)
    refused(tmp_path, data, predict, out, match=f"`{name}`", **{**SETTINGS, name: value})
    done = rate(data, predict, out, overwrite=True, **{**SETTINGS, name: value})
    assert done.resumed == 0 and before != snapshot(tmp_path)
