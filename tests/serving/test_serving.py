"""The serving application: answers, refusals that leave others served, micro-batching, limits while streaming."""

import asyncio
import json
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from favour.errors import FavourError, InvalidValue
from favour.exporting.exported import Exported
from favour.serving import Limits, create_app
from favour.serving.batching import Batcher, Stopped
from favour.serving.limits import Overloaded
from favour.serving.server import bind

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")


def fake(run=None, shape=(None, 3), kind="regression", inputs=None):
    """A model without a file: twice the sum of a row."""

    def double(arrays):
        total = 2 * arrays[0].reshape(len(arrays[0]), -1).sum(1, keepdims=True)
        return [total, np.ones_like(total)]

    ports = [{"name": "x", "dtype": "float32", "shape": list(shape)}] if inputs is None else inputs
    outputs = [{"name": n, "dtype": "float32", "shape": [None, 1], "meaning": n} for n in ("mean", "variance")]
    described = {"favour": "0", "kind": kind, "link": None, "classes": None, "labels": None, "level": 0.95}
    return Exported("fake", "onnx", described | {"inputs": ports, "outputs": outputs}, run or double)


def talk(app, conversation):
    """Run an async function with a client of the application, inside its lifespan."""

    async def main():
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await conversation(client)

    return asyncio.run(main())


def ask(app, **request):
    return talk(app, lambda client: client.post("/predict", **request))


def test_answers():
    reply = ask(create_app(fake()), json={"inputs": [[1, 2, 3], [0, 0, 0.5]]})
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    assert reply.json() == {"outputs": {"mean": [[12.0], [1.0]], "variance": [[1.0], [1.0]]}, "rows": 2}


def test_several_inputs_by_name():
    ports = [{"name": n, "dtype": "int64", "shape": [None, 2]} for n in ("ids", "mask")]
    app = create_app(fake(lambda arrays: [arrays[0].sum(1, keepdims=True), arrays[1][:, :1]], inputs=ports))
    reply = ask(app, json={"inputs": {"ids": [[1, 2]], "mask": [[0, 1]]}})
    assert reply.json()["outputs"] == {"mean": [[3]], "variance": [[0]]}
    for wrong, words in (
        ({"ids": [[1, 2]]}, "ids, mask"),
        ([[1, 2]], "ids, mask"),
        ({"ids": [[1, 2]], "mask": [[1, 2], [3, 4]]}, "different numbers of rows"),
        ({"ids": [[1.5, 2]], "mask": [[1, 2]]}, "whole numbers"),
    ):
        reply = ask(app, json={"inputs": wrong})
        assert reply.status_code == 422 and words in reply.json()["error"], reply.text


BAD = {
    "malformed": (b'{"inputs": [[1, 2', 400, "not JSON"),
    "empty": (b"", 400, "not JSON"),
    "binary": (b"\xff\xfe\x00", 400, "not JSON"),
    "deep": (b"[" * 100_000, 400, "not JSON"),
    "a list": (b"[[1,2,3]]", 422, "object"),
    "other keys": (b'{"inputs": [[1,2,3]], "model": "x"}', 422, "'model'"),
    "no inputs": (b"{}", 422, "object"),
    "a number": (b'{"inputs": 3}', 422, "a number"),
    "null": (b'{"inputs": null}', 422, "null"),
    "no rows": (b'{"inputs": []}', 422, "0 rows"),
    "too many rows": (json.dumps({"inputs": [[1, 2, 3]] * 5}).encode(), 422, "between 1 and 4"),
    "short row": (b'{"inputs": [[1,2]]}', 422, "(1, 2)"),
    "no batch": (b'{"inputs": [1,2,3]}', 422, "(3,)"),
    "ragged": (b'{"inputs": [[1,2,3],[1]]}', 422, "shape"),
    "text": (b'{"inputs": [["a","b","c"]]}', 422, "not numbers"),
    "objects": (b'{"inputs": [[{}, {}, {}]]}', 422, "not numbers"),
    "nulls": (b'{"inputs": [[1, null, 3]]}', 422, "not numbers"),
    "NaN": (b'{"inputs": [[1, NaN, 3]]}', 422, "NaN"),
    "infinity": (b'{"inputs": [[1, -Infinity, 3]]}', 422, "Infinity"),
    "overflow": (b'{"inputs": [[1, 1e999, 3]]}', 422, "infinity"),
    "too large for float32": (b'{"inputs": [[1, 1e60, 3]]}', 422, "too large"),
    "huge integer": (b'{"inputs": [[1, ' + b"9" * 400 + b", 3]]}", 422, ""),
    "long integer": (b'{"inputs": [[1, ' + b"9" * 5000 + b", 3]]}", 400, ""),
    "name of another input": (b'{"inputs": {"y": [[1,2,3]]}}', 422, "must have x"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_and_others_served(name):
    body, status, words = BAD[name]
    app = create_app(fake(), Limits(max_batch=4, max_body=200_000))

    async def conversation(client):
        good = {"inputs": [[1, 1, 1]]}
        headers = {"Content-Type": "application/json"}
        replies = await asyncio.gather(
            client.post("/predict", json=good),
            client.post("/predict", content=body, headers=headers),
            client.post("/predict", json=good),
        )
        return [*replies, await client.post("/predict", json=good)]

    first, bad, second, after = talk(app, conversation)
    assert bad.status_code == status and words in bad.json()["error"], bad.text
    assert "Traceback" not in bad.text
    for reply in (first, second, after):
        assert reply.status_code == 200 and reply.json()["outputs"]["mean"] == [[6.0]]


def test_content_type_is_required():
    reply = ask(create_app(fake()), content=b'{"inputs": [[1,2,3]]}', headers={"Content-Type": "text/plain"})
    assert reply.status_code == 415 and "application/json" in reply.json()["error"]


def test_body_limit_by_header_and_while_streaming():
    app = create_app(fake(), Limits(max_body=1000))
    headers = {"Content-Type": "application/json"}
    assert ask(app, content=b"[" * 1001, headers=headers).status_code == 413
    sent = []

    async def endless():
        while True:
            sent.append(1)
            yield b"1" * 2**20

    reply = ask(app, content=endless(), headers=headers)  # no Content-Length
    assert reply.status_code == 413 and "1000 bytes" in reply.json()["error"]
    assert len(sent) < 2**28 // 2**20 + 5  # it did not wait for the end
    asked = ask(app, content=b"[" * 1001, headers=headers | {"Expect": "100-continue"})
    assert asked.status_code == 413 and asked.headers["connection"] == "close"


def test_slow_sender_is_cut_off():
    async def slow():
        yield b'{"inputs"'
        await asyncio.sleep(30)

    app = create_app(fake(), Limits(timeout=0.1))
    reply = ask(app, content=slow(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 408


def test_slow_model_is_504_and_failing_model_is_500(caplog):
    def slow(arrays):
        time.sleep(0.5)
        return [np.zeros((len(arrays[0]), 1))] * 2

    assert ask(create_app(fake(slow), Limits(timeout=0.1)), json={"inputs": [[1, 2, 3]]}).status_code == 504

    def broken(arrays):
        raise RuntimeError("secret path")

    reply = ask(create_app(fake(broken)), json={"inputs": [[1, 2, 3]]})
    assert reply.status_code == 500 and "log" in reply.json()["error"] and "secret" not in reply.text
    assert "secret path" in caplog.text


def test_infinite_answer_is_refused():
    app = create_app(fake(lambda arrays: [np.full((len(arrays[0]), 1), np.inf)] * 2))
    reply = ask(app, json={"inputs": [[1, 2, 3]]})
    assert reply.status_code == 422 and "not finite" in reply.json()["error"]


def test_health_model_metrics_and_page():
    app = create_app(fake())

    async def conversation(client):
        await client.post("/predict", json={"inputs": [[1, 2, 3]] * 2})
        await client.post("/predict", content=b"{", headers={"Content-Type": "application/json"})
        paths = ("/health", "/model", "/metrics", "/", "/predict", "/nothing")
        return [await client.get(path) for path in paths]

    health, model, metrics, page, wrong_method, nothing = talk(app, conversation)
    assert health.json() == {"status": "ok", "waiting": 0}
    assert model.json()["inputs"][0] == {"name": "x", "dtype": "float32", "shape": [None, 3], "meaning": ""}
    assert 'favour_requests_total{status="200"} 1.0' in metrics.text
    assert 'favour_requests_total{status="400"} 1.0' in metrics.text
    assert "favour_rows_total 2.0" in metrics.text and "favour_model_calls_total 1.0" in metrics.text
    assert page.headers["content-type"].startswith("text/html") and "default-src 'none'" in str(page.headers)
    assert wrong_method.status_code == 405 and nothing.status_code == 404


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_body": 0}, {"max_wait_ms": -1.0}, {"timeout": 0.0}])
def test_limits_are_checked(wrong):
    with pytest.raises(InvalidValue):
        Limits(**wrong)


def test_port_that_is_taken_is_told():
    with bind("127.0.0.1", 0) as first:
        assert first.proto == socket.IPPROTO_TCP  # see `bind`
        first.listen()
        with pytest.raises(InvalidValue, match="Try another"):
            bind("127.0.0.1", first.getsockname()[1])
    with pytest.raises(InvalidValue, match="cannot listen"):
        bind("203.0.113.1", 0)  # not an address of this machine


# ------------------------------------------------------------------ micro-batching


def batching(conversation, run=None, batched=(True,), **options):
    """Run an async function with a batcher; returns its result and the sizes of the calls, which no clock decides."""
    calls = []
    options.setdefault("max_call", 60.0)

    def double(arrays):
        calls.append(len(arrays[0]))
        return {"y": 2 * arrays[0]}

    async def main():
        batcher = Batcher(run or double, batched, **options)
        batcher.start()
        try:
            return await conversation(batcher)
        finally:
            await batcher.stop()

    return asyncio.run(main()), calls


def rows(*values):
    return [np.array(values, dtype=float)[:, None]]


def test_requests_share_calls_and_get_their_own_rows():
    async def conversation(batcher):
        return await asyncio.gather(*(batcher(rows(i, i + 0.5), 2) for i in range(10)))

    answers, calls = batching(conversation, max_rows=8, max_wait=0.2)
    for i, answer in enumerate(answers):
        np.testing.assert_array_equal(answer["y"], [[2 * i], [2 * i + 1]])
    assert max(calls) == 8 and sum(calls) == 20 and len(calls) == 3


def test_single_request_does_not_wait_for_a_full_batch():
    async def conversation(batcher):
        return await asyncio.wait_for(batcher(rows(1.0), 1), 5)

    answer, calls = batching(conversation, max_rows=1000, max_wait=0.01)
    assert answer["y"] == [[2.0]] and calls == [1]


def test_one_bad_request_does_not_spoil_the_others():
    def run(arrays):
        if (arrays[0] < 0).any():
            raise FavourError("negative")
        return {"y": arrays[0]}

    async def conversation(batcher):
        return await asyncio.gather(*(batcher(rows(v), 1) for v in (1, -1, 2)), return_exceptions=True)

    (first, bad, second), _ = batching(conversation, run, max_wait=0.05)
    assert first["y"] == [[1]] and second["y"] == [[2]] and isinstance(bad, FavourError)


def test_full_queue_refuses():
    def slow(arrays):
        time.sleep(0.1)
        return {"y": arrays[0]}

    async def conversation(batcher):
        return await asyncio.gather(*(batcher(rows(i), 1) for i in range(6)), return_exceptions=True)

    answers, _ = batching(conversation, slow, max_rows=1, max_wait=0.0, max_queue=4)
    refused = [a for a in answers if isinstance(a, Overloaded)]
    assert len(refused) == 2 and len(answers) - len(refused) == 4


def test_cancelled_requests_are_not_computed():
    seen = []

    def run(arrays):
        seen.extend(arrays[0].ravel().tolist())
        time.sleep(0.05)
        return {"y": arrays[0]}

    async def conversation(batcher):
        tasks = [asyncio.ensure_future(batcher(rows(i), 1)) for i in range(3)]
        await asyncio.sleep(0.02)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers, _ = batching(conversation, run, max_rows=1, max_wait=0.0)
    assert isinstance(answers[2], asyncio.CancelledError) and 2.0 not in seen


def test_rows_of_different_shapes_are_not_mixed():
    async def conversation(batcher):
        wide, narrow = [np.ones((1, 3))], [np.ones((1, 2))]
        return await asyncio.gather(batcher(wide, 1), batcher(narrow, 1), batcher(wide, 1))

    answers, calls = batching(conversation, max_wait=0.05)
    assert [a["y"].shape for a in answers] == [(1, 3), (1, 2), (1, 3)] and calls == [1, 1, 1]


def test_stopping_answers_what_waits():
    async def main():
        batcher = Batcher(lambda arrays: {"y": arrays[0]}, [True], max_wait=10.0)
        batcher.start()
        task = asyncio.ensure_future(batcher(rows(1.0), 1))
        await asyncio.sleep(0.01)
        await batcher.stop()
        results = await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(Stopped):
            await batcher(rows(1.0), 1)
        return results[0]

    answer = asyncio.run(main())
    assert isinstance(answer, Stopped) or answer["y"] == [[1.0]]


# ------------------------------------------------------------------ the command, over a real socket


def test_command_serves_and_refuses_a_hundred_megabytes(tmp_path):
    path = small_onnx(tmp_path / "net.onnx")
    command = [sys.executable, "-m", "favour.cli", "serve", str(path), "--port", "0", "--max-body", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, process.stderr.read() if process.poll() else line
        address = line.split()[3]
        with httpx.Client(base_url=address, timeout=60) as client:
            for _ in range(100):
                try:
                    assert client.get("/health").status_code == 200
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            good = {"inputs": [[1, 2, 3]]}
            assert client.post("/predict", json=good).json()["outputs"] == {"mean": [[2.0]]}
            before = memory(process.pid)
            headers = {"Content-Type": "application/json"}
            reply = client.post("/predict", content=b"[" * 100_000_000, headers=headers)
            assert reply.status_code == 413 and "100000 bytes" in reply.json()["error"]
            assert memory(process.pid) - before < 50e6
            assert client.post("/predict", json=good).status_code == 200
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 10) as raw:  # not HTTP at all
            raw.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
            assert b"400" in raw.recv(1000)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def small_onnx(path):
    """y = 2x₁, written by hand: translating a network takes longer than everything else here."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    make = onnx.helper
    ports = [make.make_tensor_value_info("x", 1, [None, 3])], [make.make_tensor_value_info("mean", 1, [None, 1])]
    weight = make.make_tensor("w", 1, [3, 1], [2.0, 0.0, 0.0])
    graph = make.make_graph([make.make_node("MatMul", ["x", "w"], ["mean"])], "g", *ports, [weight])
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=9)
    described = {"format": 1, "favour": "0", "kind": "regression", "link": None, "classes": None, "labels": None}
    described |= {"level": 0.95, "inputs": [{"name": "x", "dtype": "float32", "shape": [None, 3]}]}
    described |= {"outputs": [{"name": "mean", "dtype": "float32", "shape": [None, 1]}]}
    make.set_model_props(model, {"favour": json.dumps(described)})
    onnx.save(model, path)
    return path


def memory(pid):
    """Resident bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
