"""What a request may hold and ask for, and what it is told: values, bytes, hosts, ids, versions, the API."""

import asyncio
import hashlib
import json
import logging
import re

import numpy as np
import pytest
from test_serving import ask, batching, fake, rows, small_onnx, talk

from favour.errors import InvalidValue
from favour.serving import Limits, create_app
from favour.serving import reading as reading_module
from favour.serving import server as server_module
from favour.serving.batching import BadAnswer
from favour.serving.gate import Hosts
from favour.serving.limits import Capacity, Overloaded
from favour.serving.logs import Repeats
from favour.serving.reading import encode, most_values
from favour.serving.refusals import Refused

JSON = {"Content-Type": "application/json"}

# ------------------------------------------------------------------ values and bytes


def test_values_are_counted_before_any_is_made(monkeypatch):
    model = fake()
    assert most_values(model, Limits(max_batch=4)) == 2 * 4 * 3
    assert most_values(fake(shape=(None, None)), Limits(max_values=77)) == 77
    monkeypatch.setattr(reading_module, "_text", lambda body: pytest.fail("the JSON was read"))
    reply = ask(create_app(model, Limits(max_batch=4)), content=b'{"inputs": [[' + b"1," * 30 + b"1]]}", headers=JSON)
    assert reply.status_code == 413 and "24 values" in reply.json()["error"]


def test_as_many_values_as_allowed_are_taken():
    row = [1.0] * 50
    app = create_app(fake(shape=(None, None)), Limits(max_values=100))
    assert ask(app, json={"inputs": [row, row]}).status_code == 200
    assert ask(app, json={"inputs": [row, [*row, 1.0]]}).status_code == 413


def test_all_requests_together_hold_so_many_values():
    import time

    def slow(arrays):
        time.sleep(0.2)
        return [arrays[0][:, :1]] * 2

    app = create_app(fake(slow, shape=(None, None)), Limits(max_values=100, max_held_values=250, max_wait_ms=0.0))

    async def conversation(client):
        body = {"inputs": [[1.0] * 100]}
        replies = await asyncio.gather(*(client.post("/predict", json=body) for _ in range(6)))
        return replies, await client.post("/predict", json=body)

    replies, after = talk(app, conversation)
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) == {200, 503} and statuses.count(200) == 2
    refused = next(reply for reply in replies if reply.status_code == 503)
    assert refused.headers["retry-after"] == "1" and "250" in refused.json()["error"]
    assert after.status_code == 200  # everything was given back


def test_capacity_always_serves_one_and_gets_everything_back():
    capacity = Capacity(10, "things")
    with capacity.hold() as first:
        first.add(25)  # alone
        with capacity.hold() as second, pytest.raises(Overloaded, match="10"):
            second.add(1)
        assert capacity.held == 25
    with capacity.hold() as one, capacity.hold() as other:
        one.add(4)
        other.add(6)
        with pytest.raises(Overloaded):
            one.add(1)
    assert capacity.held == 0


def test_bodies_together_hold_so_many_bytes():
    limits = Limits(max_body=200_000, max_held_bytes=250_000, max_values=10**6)
    gate = asyncio.Event()

    async def body(size):
        yield b" " * size
        await gate.wait()
        yield b'{"inputs": [[1, 2, 3]]}'

    async def conversation(client):
        first = asyncio.ensure_future(client.post("/predict", content=body(190_000), headers=JSON))
        await asyncio.sleep(0.05)
        second = await client.post("/predict", content=body(199_000), headers=JSON)
        small = asyncio.ensure_future(client.post("/predict", content=body(60_000), headers=JSON))
        await asyncio.sleep(0.05)
        gate.set()
        return await first, second, await small

    first, second, small = talk(create_app(fake(), limits), conversation)
    assert (first.status_code, second.status_code, small.status_code) == (200, 503, 200)
    assert "bytes" in second.json()["error"] and second.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_values": 0},
        {"max_connections": 0},
        {"header_timeout": 0.0},
        {"min_rate": -1.0},
        {"max_values": 2**30},
        {"max_body": 2**30},
    ],
)
def test_new_limits_are_checked(wrong):
    with pytest.raises(InvalidValue):
        Limits(**wrong)


def test_slow_body_is_cut_off_by_its_rate(monkeypatch):
    monkeypatch.setattr(reading_module, "GRACE", 0.1)

    async def slow():
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.05)

    reply = ask(create_app(fake(), Limits(min_rate=1000.0, timeout=60.0)), content=slow(), headers=JSON)
    assert reply.status_code == 408 and "1000 bytes a second" in reply.json()["error"]


# ------------------------------------------------------------------ JSON

MORE_BAD = {
    "inputs twice": (b'{"inputs": [[1,2,3]], "inputs": [[4,5,6]]}', 422, "twice"),
    "an input twice": (b'{"inputs": {"x": [[1,2,3]], "x": [[4,5,6]]}}', 422, "twice"),
    "truths": (b'{"inputs": [[true, false, true]]}', 422, "true or false"),
    "a truth among numbers": (b'{"inputs": [[1.5, true, 2]]}', 422, "true or false"),
    "lone surrogate": (b'{"inputs": [[1,2,3]], "\\ud800": 1}', 422, "ud800"),
    "giant name": (b'{"' + b"a" * 100_000 + b'": 1}', 422, "besides"),
    "giant text": (b'{"inputs": [["' + b"a" * 100_000 + b'"]]}', 422, "a text, not numbers"),
    "trailing comma": (b'{"inputs": [[1,2,3],]}', 400, "not JSON"),
    "trailing comma of the object": (b'{"inputs": [[1,2,3]],}', 400, "not JSON"),
    "missing comma": (b'{"inputs": [[1,2,3] [4,5,6]]}', 400, "not JSON"),
    "missing colon": (b'{"inputs" [[1,2,3]]}', 400, "not JSON"),
    "name without quotes": (b"{inputs: [[1,2,3]]}", 400, "not JSON"),
    "more behind": (b'{"inputs": [[1,2,3]]} {}', 400, "not JSON"),
    "text behind": (b'{"inputs": [[1,2,3]]}x', 400, "not JSON"),
    "an open object": (b'{"inputs": {"x": [[1,2,3]]', 400, "not JSON"),
    "nothing behind the name": (b'{"inputs":', 400, "not JSON"),
    "two values": (b"1 2", 400, "not JSON"),
    "deep rows": (b'{"inputs": [' + b"[" * 50_000 + b"1", 400, "not JSON"),
    "deep rows that end": (b'{"inputs": [' + b"[" * 100 + b"1" + b"]" * 100 + b"]}", 422, ""),
    "objects in rows": (b'{"inputs": [[1, {"a": 1}, 2]]}', 422, "an object, not numbers"),
    "lists in rows": (b'{"inputs": [[1, [2], 2]]}', 422, "different lengths"),
    "rows of two shapes": (b'{"inputs": [[1,2,3],[1,2]]}', 422, "one shape"),
    "control character": (b'{"inp\x00uts": [[1,2,3]]}', 400, "not JSON"),
    "UTF-16 that ends early": ("{".encode("utf-16") + b"\x00", 400, "not JSON"),
}


@pytest.mark.parametrize("name", MORE_BAD)
def test_more_bad_json_is_refused_in_words(name):
    body, status, words = MORE_BAD[name]
    reply = ask(create_app(fake()), content=body, headers=JSON)
    assert reply.status_code == status and words in reply.json()["error"], reply.text
    assert set(reply.json()) == {"error", "request"} and len(reply.text) < 1000


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unusual_good_json_is_taken(coding):
    text = ' {\n"inputs" :\t{ "x": [ [1, -2.5e0 , 3],\r[4,5,6] ] }\n} \n'
    reply = ask(create_app(fake()), content=text.encode(coding), headers=JSON)
    assert reply.status_code == 200 and reply.json()["outputs"]["mean"] == [[3.0], [30.0]]


def test_compressed_body_is_refused():
    reply = ask(create_app(fake()), content=b"\x1f\x8b", headers=JSON | {"Content-Encoding": "gzip"})
    assert reply.status_code == 415 and "gzip" in reply.json()["error"]


def test_long_rows_come_out_as_they_went_in(monkeypatch):
    monkeypatch.setattr(reading_module, "PIECE", 7)  # many pauses
    x = np.random.default_rng(0).normal(size=(20, 3, 4)).astype(np.float32)
    app = create_app(fake(lambda arrays: [arrays[0], arrays[0][:, 0, :1]], shape=(None, 3, 4)))

    async def conversation(client):
        return await asyncio.gather(*(client.post("/predict", json={"inputs": (x + i).tolist()}) for i in range(5)))

    for i, reply in enumerate(talk(app, conversation)):
        np.testing.assert_array_equal(np.float32(reply.json()["outputs"]["mean"]), x + i)


def test_encoded_answer_is_the_standard_librarys():
    outputs = {
        "a": np.random.default_rng(0).normal(size=(300, 2, 5)),
        'ß"': np.arange(300),
        "c": np.zeros((300, 0)),
    }
    work = encode(outputs, 300)
    with pytest.raises(StopIteration) as end:
        while True:
            next(work)
    assert json.loads(end.value.value) == {"outputs": {k: v.tolist() for k, v in outputs.items()}, "rows": 300}
    outputs["a"][299, 1, 4] = np.nan
    with pytest.raises(Refused, match="not finite"):
        list(encode(outputs, 300))


# ------------------------------------------------------------------ the gate


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        (
            ["localhost", "127.0.0.1", "::1"],
            ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "[::1]:8000", "[0:0::1]"],
            [
                *("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "localhost@evil.example", "", "[::1"),
                *("a b", "10.0.0.1", "localhost:80:80", "localhost/evil.example", "[::1].evil.example"),
            ],
        ),
        (["0.0.0.0", "api.example"], ["10.1.2.3:8000", "[fe80::1]", "api.example:443"], ["evil.example", "api"]),
        (["*"], ["evil.example", "anything at all"], []),
        (["[::1]"], ["[::1]"], ["::1:evil"]),
    ],
)
def test_hosts(names, good, bad):
    hosts = Hosts(names)
    assert [name for name in good if name not in hosts] == [] and [name for name in bad if name in hosts] == []


@pytest.mark.parametrize("path", ["/", "/model", "/health", "/metrics", "/docs", "/openapi.json", "/nothing"])
def test_foreign_host_reaches_no_path(path):
    app = create_app(fake())
    reply = talk(app, lambda client: client.get(path, headers={"Host": "evil.example"}))
    assert reply.status_code == 421 and "--allow-host" in reply.json()["error"]


def test_hosts_can_be_added():
    app = create_app(fake(), hosts=["api.example"])
    replies = [talk(app, lambda c, h=h: c.get("/health", headers={"Host": h})) for h in ("api.example:80", "localhost")]
    assert [reply.status_code for reply in replies] == [200, 421]


def test_request_ids(caplog):
    def broken(arrays):
        raise RuntimeError("secret path")

    app = create_app(fake(broken))

    async def conversation(client):
        def post(**headers):
            return client.post("/predict", json={"inputs": [[1, 2, 3]]}, headers=headers)

        return [
            await post(**{"X-Request-ID": "order-17"}),
            await post(**{"X-Request-ID": "a b"}),
            await post(**{"X-Request-ID": "a" * 200}),
            await post(),
            await client.get("/health", headers={"X-Request-ID": "mine"}),
            await client.get("/nothing", headers={"X-Request-ID": "mine"}),
        ]

    first, space, long, none, health, nothing = talk(app, conversation)
    assert first.headers["x-request-id"] == first.json()["request"] == "order-17"
    made = [reply.headers["x-request-id"] for reply in (space, long, none)]
    assert len(set(made)) == 3 and all(re.fullmatch("[0-9a-f]{32}", name) for name in made)
    assert health.headers["x-request-id"] == nothing.json()["request"] == "mine"
    assert "request order-17: the model failed" in caplog.text and made[2] in caplog.text and "a b" not in caplog.text


def test_paths_and_methods_that_do_not_exist_are_json():
    async def conversation(client):
        return [await client.get("/nothing"), await client.delete("/predict"), await client.request("PURGE", "/model")]

    nothing, delete, purge = talk(create_app(fake()), conversation)
    assert nothing.status_code == 404 and "/docs" in nothing.json()["error"]
    assert delete.status_code == 405 and delete.headers["allow"] == "POST" and "error" in delete.json()
    assert purge.status_code == 405 and "GET" in purge.headers["allow"]


def test_client_that_leaves_is_no_failure_of_the_model(caplog):
    app = create_app(fake())
    sent = []

    async def main():
        async with app.router.lifespan_context(app):
            messages = iter(
                [{"type": "http.request", "body": b'{"inp', "more_body": True}, {"type": "http.disconnect"}]
            )

            async def receive():
                return next(messages)

            async def send(message):
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "query_string": b""}
            scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
            await app(scope | {"http_version": "1.1", "scheme": "http", "server": ("x", 1)}, receive, send)

    asyncio.run(main())
    assert sent == [] and caplog.text == ""
    counts = {s.labels["status"] for m in app.state.metrics.requests.collect() for s in m.samples}
    assert counts == {"499"}


# ------------------------------------------------------------------ what the server says of itself


@pytest.mark.filterwarnings("ignore::favour.errors.UncheckedFile")  # written by hand
def test_model_tells_versions_and_the_digest_of_its_file(tmp_path):
    import favour

    path = small_onnx(tmp_path / "net.onnx")
    model = talk(create_app(str(path)), lambda client: client.get("/model")).json()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert model["sha256"] == digest and model["version"] == digest[:12] and model["file"] == "net.onnx"
    assert model["favour"] == favour.__version__ and model["exported_by_favour"] == "0"
    named = talk(create_app(str(path), version="2024-05"), lambda client: client.get("/model")).json()
    assert named["version"] == "2024-05" and named["sha256"] == digest


def test_api_is_described():
    jsonschema = pytest.importorskip("jsonschema")
    ports = [{"name": n, "dtype": d, "shape": s} for n, d, s in (("ids", "int64", [None, 2]), ("w", "float32", [None]))]
    for model in (fake(), fake(shape=(None, 2, None)), fake(inputs=ports)):
        app = create_app(model, Limits(max_batch=3))

        async def conversation(client):
            described = (await client.get("/openapi.json")).json()
            content = described["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]
            schema = {"$ref": "#/components/schemas/Request", "components": described["components"]}
            jsonschema.validate(content["example"], schema)
            reply = await client.post("/predict", json=content["example"])
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({"inputs": [["a"]]}, schema)
            return described, reply, await client.get("/docs"), await client.post("/predict", json={"inputs": []})

        described, reply, page, bad = talk(app, conversation)
        assert described["openapi"].startswith("3.1") and reply.status_code in (200, 500)  # the fake takes one input
        for name, value in (("Answer", reply), ("Error", bad)):
            if name == "Error" or reply.status_code == 200:
                schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
                jsonschema.validate(value.json(), schema)
        assert set(described["paths"]) == {"/predict", "/health", "/model", "/metrics"}
        assert not re.search(r"https?://(?!HOST)|@import|url\(|<script|<img|<iframe|src=", page.text)
        assert "default-src 'none'" in page.headers["content-security-policy"] and "POST /predict" in page.text


def test_names_in_the_description_are_escaped():
    ports = [{"name": "<b>x</b>", "dtype": "float32", "shape": [None, 1], "meaning": "<script>"}]
    page = talk(create_app(fake(inputs=ports)), lambda client: client.get("/docs")).text
    assert "<b>" not in page and "<script>" not in page


# ------------------------------------------------------------------ the log


def test_repeated_messages_are_counted_not_written():
    now = [0.0]
    repeats = Repeats(most=3, period=60.0, kinds=2, clock=lambda: now[0])
    written = []
    logger = logging.Logger("a logger")
    logger.addFilter(repeats)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: written.append(record.getMessage())
    for i in range(1000):
        logger.error("request %s failed", i)
    assert written == [f"request {i} failed" for i in range(3)]
    now[0] = 61.0
    logger.error("request %s failed", "x")
    assert written[-1] == "request x failed [997 more of this kind were not written since]"
    for i in range(1000):  # there are only two kinds: the one above and the first; all others count as one
        logger.error(f"template {i}")
    assert len(written) == 4 + 1 + 3


def test_running_application_bounds_its_log(caplog):
    def broken(arrays):
        raise RuntimeError("broken")

    async def conversation(client):
        for _ in range(50):
            await client.post("/predict", json={"inputs": [[1, 2, 3]]})

    talk(create_app(fake(broken)), conversation)
    assert 1 <= sum(record.exc_info is not None for record in caplog.records) <= 10


# ------------------------------------------------------------------ micro-batching


def test_one_bad_request_among_many_costs_few_calls():
    sizes = []

    def run(arrays):
        sizes.append(len(arrays[0]))
        if (arrays[0] < 0).any():
            raise RuntimeError("negative")
        return {"y": arrays[0]}

    async def conversation(batcher):
        values = [*range(37), -1.0, *range(38, 64)]
        return await asyncio.gather(*(batcher(rows(v), 1) for v in values), return_exceptions=True)

    answers, _ = batching(conversation, run, max_rows=64, max_wait=0.2)
    assert isinstance(answers[37], RuntimeError) and sizes[0] == 64
    assert all(answers[i]["y"] == [[i]] for i in range(64) if i != 37)
    assert len(sizes) == 1 + 2 * 6


def test_answer_with_another_number_of_rows_is_no_answer():
    async def conversation(batcher):
        return await asyncio.gather(*(batcher(rows(v), 1) for v in (1, 2, 3)), return_exceptions=True)

    answers, _ = batching(conversation, lambda arrays: {"y": arrays[0][:-1]}, max_wait=0.05)
    assert all(isinstance(answer, BadAnswer) for answer in answers)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("soft", "hard", "room", "asked"),
    [(20000, 20000, 1000, None), (256, 4096, 1000, 1192), (256, 512, 320, 512), (64, 64, 8, 64)],
)
def test_as_many_connections_as_files_allow(monkeypatch, caplog, soft, hard, room, asked):
    resource = pytest.importorskip("resource")
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: set_to.append(pair))
    assert server_module.room_for(1000) == room
    assert set_to == ([] if asked is None else [(asked, hard)])
    assert ("ulimit" in caplog.text) == (room < 1000)
