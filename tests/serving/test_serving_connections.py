"""A running server and clients with bad manners, over real sockets on 127.0.0.1."""

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_serving import fake

from favour.serving import Limits, create_app
from favour.serving import reading as reading_module
from favour.serving.server import guarded

pytest.importorskip("uvicorn")
connections_module = pytest.importorskip("favour.serving.connections")
GOOD = b'{"inputs": [[1, 2, 3]]}'
POST = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Server:
    """A server in a thread."""

    def __init__(self, model=None, **limits):
        self.app = create_app(model or fake(), Limits(**limits))
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.server = guarded(self.app, Limits(**limits))
        self.guard = self.server.config.http.__self__  # the `Connections`
        self.thread = threading.Thread(target=self.server.run, args=([self.listening],), daemon=True)
        self.thread.start()
        wait(lambda: self.server.started)

    def connect(self):
        client = socket.create_connection(("127.0.0.1", self.port), 20)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client

    def ended(self):
        """How many connections the server ended, by reason."""
        samples = [s for m in self.app.state.metrics.closed.collect() for s in m.samples if s.name.endswith("_total")]
        return Counter({s.labels["reason"]: int(s.value) for s in samples})

    def statuses(self):
        samples = [s for m in self.app.state.metrics.requests.collect() for s in m.samples if s.name.endswith("_total")]
        return Counter({s.labels["status"]: int(s.value) for s in samples})

    def stop(self):
        self.server.should_exit = True
        self.thread.join(20)
        self.listening.close()


@pytest.fixture
def serve():
    running = []

    def start(model=None, **limits):
        running.append(Server(model, **limits))
        return running[-1]

    yield start
    for one in running:
        one.stop()


def wait(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def post(body, more=b""):
    return POST + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def answer(client):
    """Status, headers and content of the next answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (byte := client.recv(1)):
            raise EOFError(head)
        head += byte
    first, *lines = head.decode().lower().strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    body, length = b"", int(headers.get("content-length", 0))
    while len(body) < length:
        body += client.recv(length - len(body))
    return int(first.split()[1]), headers, body


def refused(client):
    """The status of an answer that has to be an error as all are, after which the server hangs up."""
    status, headers, body = answer(client)
    content = json.loads(body)
    assert set(content) == {"error", "request"} and content["request"] == headers["x-request-id"]
    assert headers["connection"] == "close" and "Traceback" not in content["error"]
    assert client.recv(1000) == b""
    return status


def test_half_a_head_is_answered_408_in_time(serve):
    server = serve(header_timeout=0.3)
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        assert refused(client) == 408
    with server.connect() as client:  # also where a byte now and then keeps it alive
        client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        stop = threading.Event()

        def dribble():
            with contextlib.suppress(OSError):
                while not stop.wait(0.05):
                    client.sendall(b"a")

        thread = threading.Thread(target=dribble)
        thread.start()
        assert answer(client)[0] == 408
        stop.set()
        thread.join()
    with server.connect() as client:  # and after a good request
        client.sendall(HEALTH)
        assert answer(client)[0] == 200
        client.sendall(b"GET /hea")
        assert refused(client) == 408
    with server.connect() as client:  # who says nothing is told nothing
        assert client.recv(1000) == b""
    assert server.ended()["header timeout"] == 4


def test_half_sent_heads_leave_room_for_others(serve):
    server = serve(max_connections=10)
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(server.connect())
        good.sendall(post(GOOD))
        assert answer(good)[0] == 200
        for _ in range(50):
            stack.enter_context(server.connect()).sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        for _ in range(3):
            with server.connect() as client:
                client.sendall(HEALTH)
                assert answer(client)[0] == 200
        assert len(server.guard.all) <= 10
        good.sendall(post(GOOD))  # it was answered before, so it was not the one to go
        assert answer(good)[0] == 200
    assert server.ended()["room"] >= 40


def test_half_sent_bodies_leave_room_for_others(serve):
    server = serve(max_connections=10)
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(server.connect()).sendall(POST + b"Content-Length: 1000\r\n\r\n{")
        with server.connect() as client:
            client.sendall(post(GOOD))
            assert answer(client)[0] == 200
    wait(lambda: not server.guard.all and not server.server.server_state.tasks)  # none of them is still being read
    assert server.ended()["room"] >= 20 and set(server.statuses()) == {"200", "499"}


def test_full_of_requests_at_work_is_503(serve):
    held = threading.Event()

    def slow(arrays):
        held.wait(20)
        return [arrays[0][:, :1]] * 2

    server = serve(fake(slow), max_connections=3)
    with contextlib.ExitStack() as stack:
        stack.callback(held.set)
        busy = [stack.enter_context(server.connect()) for _ in range(3)]
        for client in busy:
            client.sendall(post(GOOD))
        wait(lambda: not server.guard._strangers and len(server.guard.all) == 3)
        with server.connect() as client:
            status, headers, _ = answer(client)
            assert status == 503 and headers["retry-after"] == "1"
        held.set()
        assert [answer(client)[0] for client in busy] == [200] * 3


def test_slow_body_is_answered_408(serve, monkeypatch):
    monkeypatch.setattr(reading_module, "GRACE", 0.2)
    server = serve()
    with server.connect() as client:
        client.sendall(POST + b"Content-Length: 1000\r\n\r\n{")
        assert refused(client) == 408


def test_body_that_nobody_wants_has_its_time_too(serve, monkeypatch):
    monkeypatch.setattr(connections_module, "GRACE", 0.0)
    server = serve(timeout=0.3)
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert answer(client)[0] == 200
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"1\r\na\r\n")
                time.sleep(0.01)
    assert server.ended()["body timeout"] == 1


def test_refused_body_is_thrown_away_and_the_connection_goes_on(serve):
    server = serve(max_body=100_000)
    with server.connect() as client:
        for _ in range(2):
            client.sendall(post(b"[" * 3_000_000))
            status, headers, body = answer(client)
            assert status == 413 and "100000 bytes" in json.loads(body)["error"] and "connection" not in headers
        client.sendall(post(GOOD))
        assert answer(client)[0] == 200
    assert server.guard.discarding == 0


def test_body_without_end_is_thrown_away_only_so_far(serve, monkeypatch):
    monkeypatch.setattr(connections_module, "DISCARDED", 5_000_000)
    server = serve(max_body=100_000)
    with server.connect() as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"10000\r\n" + b"[" * 65536 + b"\r\n")
    wait(lambda: server.ended()["too much"] == 1)
    wait(lambda: server.guard.discarding == 0)


HEADS = {
    "a giant field, whole": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 50_000 + b"\r\n\r\n", 431),
    "a giant field, unfinished": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 50_000, 431),
    "a giant path": (b"GET /" + b"a" * 50_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    "many fields": (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
    "not HTTP": (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}}}", 400),
    "a negative length": (POST + b"Content-Length: -5\r\n\r\n", 400),
    "another coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    "a bad chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "tiny chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 5000, 400),
}


@pytest.mark.parametrize("name", HEADS)
def test_bad_http_is_refused_in_json(serve, name):
    raw, status = HEADS[name]
    server = serve()
    with server.connect() as client:
        client.sendall(raw)
        assert refused(client) == status
    assert server.ended()["bad request"] == 1
    with server.connect() as client:
        client.sendall(post(GOOD))
        assert answer(client)[0] == 200


def test_giant_length_unicode_and_upgrades(serve):
    server = serve()
    with server.connect() as client:
        client.sendall(POST + b"Content-Length: " + b"9" * 20 + b"\r\n\r\n")
        assert answer(client)[0] == 413
    with server.connect() as client:
        client.sendall(b"GET /%ff%00%e2%82%ac/../etc/passwd HTTP/1.1\r\nHost: localhost\r\nX: \xff\xfe\r\n\r\n")
        assert answer(client)[0] == 404
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert answer(client)[0] == 200
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # nothing in HTTP/1.0 requires a host
        assert answer(client)[0] == 200


def test_asking_before_sending_is_answered(serve):
    server = serve(max_body=1000)
    with server.connect() as client:
        client.sendall(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(GOOD))
        assert answer(client)[0] == 100
        client.sendall(GOOD)
        assert answer(client)[0] == 200
        client.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 2000\r\n\r\n")
        assert refused(client) == 413


def test_pipelined_requests_are_answered_in_order(serve):
    server = serve()
    with server.connect() as client:
        client.sendall(b"".join(post(b'{"inputs": [[%d, 0, 0]]}' % i) for i in range(100)))
        for i in range(100):
            status, _, body = answer(client)
            assert status == 200 and json.loads(body)["outputs"]["mean"] == [[2.0 * i]]


def test_requests_sent_ahead_wait_outside(serve):
    server = serve(fake(lambda arrays: (time.sleep(0.02), [arrays[0][:, :1]] * 2)[1]))
    with server.connect() as client:
        client.settimeout(0.5)
        requests = post(b'{"inputs": [[1, 2, 3]]}' + b" " * 5000)
        with contextlib.suppress(TimeoutError):
            for _ in range(4000):
                client.sendall(requests)
        held = [len(c.conn.trailing_data[0]) for c in list(server.guard.all)]
        assert server.statuses()["200"] >= 5 and max(held) < 2**20  # not 256 kB more for each that was answered


def test_who_does_not_read_is_hung_up_on(serve):
    def large(arrays):
        return [np.zeros((len(arrays[0]), 200_000), dtype=np.float32)] * 2

    server = serve(fake(large), timeout=1.0)
    with server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(post(GOOD) * 10)
        wait(lambda: server.ended()["slow reader"] == 1)
    wait(lambda: not server.guard.all)


def test_leaving_is_no_failure(serve, caplog):
    server = serve()
    for head in (b"Content-Length: 5000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n9\r\n"):
        with server.connect() as client:
            client.sendall(POST + head + b'{"in')
            wait(lambda: server.guard.all)
    wait(lambda: server.statuses()["499"] == 2)
    assert server.statuses()["500"] == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_shutting_down_finishes_what_was_begun(serve):
    begun = threading.Event()

    def slow(arrays):
        begun.set()
        time.sleep(0.3)
        return [arrays[0][:, :1]] * 2

    server = serve(fake(slow))
    with server.connect() as client, server.connect() as idle, server.connect() as half:
        half.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        idle.sendall(HEALTH)
        assert answer(idle)[0] == 200
        client.sendall(post(GOOD))
        begun.wait(20)
        server.server.should_exit = True
        status, _, body = answer(client)
        assert status == 200 and json.loads(body)["rows"] == 1
        assert client.recv(10) == idle.recv(10) == b""
    server.thread.join(20)
    assert not server.thread.is_alive()


def test_hostile_clients_beside_good_ones(tmp_path):
    """The campaign in small: behaviour, not time."""
    campaign = Path(__file__).parents[2] / "benchmarks" / "campaigns" / "server.py"
    out = tmp_path / "server.json"
    options = ["--small", "--only", "soak", "--soak", "5", "--heads", "30", "--out", str(out)]
    done = subprocess.run([sys.executable, str(campaign), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    soak = json.loads(out.read_text())["soak"]
    assert soak["requests"] > 20 and soak["errors"] == {} and soak["wrong_answers"] == 0 and soak["healthy_after"]
    assert {name: found for name, found in soak["refused"].items() if found["unexpected"]} == {}
    assert len(soak["refused"]) > 35 and soak["log_bytes"] < 100_000
