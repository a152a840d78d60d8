"""The try-it page: what it holds, and what it does in a real browser against a running server."""

import json
import re
import socket
import threading
import time

import numpy as np
import pytest
from browsing import started

from favour.exporting.exported import Exported
from favour.serving import Limits, create_app
from favour.serving.app import describe
from favour.serving.page import page as write_page

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def described(kind, inputs, outputs, **more):
    ports = [{"name": n, "dtype": d, "shape": s} for n, d, s in inputs]
    given = {"favour": "0", "kind": kind, "link": None, "classes": None, "labels": None, "level": None}
    return given | more | {"inputs": ports, "outputs": [{"name": n, "dtype": "float32", "shape": []} for n in outputs]}


def classifier(classes, labels=None, features=4, seen=None):
    """Logits are the first features; unsure where they are large."""
    names = ("mean", "variance", "probabilities", "jsd", *(["covariance"] if classes <= 10 else []))

    def run(arrays):
        x = arrays[0].reshape(len(arrays[0]), -1)
        mean = np.resize(x, (len(x), classes)).astype(np.float32)
        variance = 0.3 + 0.1 * mean**2
        covariance = variance[:, :, None] * np.eye(classes) + 0.1
        p = softmax(mean)
        return [mean, variance, p, (p * variance).sum(1) * 0.1, covariance][: len(names)]

    more = {"link": "softmax", "classes": classes, "labels": labels, "seen": seen}
    return Exported("m", "onnx", described("classification", [("x", "float32", [None, features])], names, **more), run)


def regression(outputs=1):
    def run(arrays):
        mean = np.tile(arrays[0].sum(1, keepdims=True), (1, outputs)) + np.arange(outputs)
        sd = 1 + 0.1 * np.abs(mean)
        return [mean, sd**2, sd, mean - 1.96 * sd, mean + 1.96 * sd]

    names = ("mean", "variance", "stddev", "lower", "upper")
    return Exported("m", "onnx", described("regression", [("x", "float32", [None, 5])], names, level=0.95), run)


def two_inputs():
    def run(arrays):
        mean = arrays[0].sum(1, keepdims=True).astype(float)
        return [mean, mean * 0, mean * 0, mean, mean]

    names = ("mean", "variance", "stddev", "lower", "upper")
    inputs = [("ids", "int64", [None, 3]), ("mask", "int64", [None, 3])]
    return Exported("m", "onnx", described("regression", inputs, names, level=0.9), run)


SEEN = {
    "rows": 100,
    "inputs": [{"mean": [50.0] * 4, "stddev": [2.0] * 4, "low": [46.0] * 4, "high": [54.0] * 4}],
    "scores": {"jsd": [k / 2500 for k in range(101)], "entropy": [k / 100 for k in range(101)]},
}
MODELS = {
    "three": lambda: classifier(3, ["cat", "dog", "a <b>bird</b> with a long name"]),
    "known": lambda: classifier(3, seen=SEEN),
    "ten": lambda: classifier(10, features=10),
    "many": lambda: classifier(100, features=64),
    "regression": regression,
    "outputs": lambda: regression(4),
    "two inputs": two_inputs,
}


def test_page_asks_for_nothing_from_elsewhere():
    for make in MODELS.values():
        text = write_page(describe(make(), Limits()))
        assert set(re.findall(r"https?://[^\s\"'`<]+", text)) == {
            "http://www.w3.org/2000/svg"
        }  # a name, not an address
        assert not re.search(r"@import|url\(|<img|<iframe|src=", text)


def test_labels_cannot_leave_their_script():
    model = classifier(3, ["</script><script>alert(1)</script>", "b", "c"])
    text = write_page(describe(model, Limits()))
    assert text.count("<script") == 2 and "alert(1)</script>" not in text
    inner = re.search(r'id="model">(.*?)</script>', text, re.DOTALL).group(1)
    assert json.loads(inner)["labels"][0] == "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def chromium():
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def addresses():
    """Every model on a port of its own, in threads."""
    servers, found = [], {}
    for name, make in MODELS.items():
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(make()), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        servers.append((server, thread, listening))
        found[name] = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    while not all(server.started for server, _, _ in servers):
        time.sleep(0.02)
    yield found
    for server, thread, listening in servers:
        server.should_exit = True
        thread.join(20)
        listening.close()


class Visit:
    """A page of one of the servers, with what it asked for and complained about."""

    def __init__(self, browser, address, width=1280, scheme="light"):
        self.address, self.width = address, width
        self.page = browser.new_page(viewport={"width": width, "height": 850}, color_scheme=scheme)
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#raw:not([hidden])", state="attached")

    def text(self, selector):
        return self.page.locator(selector).inner_text()

    def predict(self, text, box=0):
        """Type an input, press the button, and wait for the answer to it."""
        self.page.fill(f"#text-{box}", text)
        with self.page.expect_response(lambda r: r.url.endswith("/predict")):
            self.page.click("#predict")
        self.page.wait_for_timeout(100)

    def close(self):
        self.page.close()


@pytest.fixture
def visit(chromium, addresses):
    opened = []

    def go(name, **options):
        opened.append(Visit(chromium, addresses[name], **options))
        return opened[-1]

    yield go
    for one in opened:
        one.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["three", "ten", "regression"])
def test_page_fits_and_stays_at_home(visit, name, width, scheme):
    one = visit(name, width=width, scheme=scheme)
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    background = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")
    for box in one.page.locator("#result svg").all():
        area = box.bounding_box()
        assert area["width"] > 200 and area["height"] > 40
    for button in one.page.locator("button").all():
        assert button.bounding_box()["height"] >= 36  # a finger
    home = ("data:", one.address)
    assert [url for url in one.requests if not url.startswith(home)] == [] and one.complaints == []


@pytest.mark.browser
def test_three_classes_show_the_simplex(visit):
    one = visit("three")
    one.predict("3, 0, 0, 0")
    assert one.text("#result .verdict").startswith("cat, 90.9")
    draws = one.page.locator("circle.draw")
    assert draws.count() == 300
    # The cloud lies in the triangle, and leans to the corner of the class; that corner is at the lower left.
    places = one.page.evaluate(
        "[...document.querySelectorAll('circle.draw')].map(c => [+c.getAttribute('cx'), +c.getAttribute('cy')])"
    )
    assert all(29 <= x <= 331 and 21 <= y <= 263 for x, y in places)
    assert np.mean([x for x, _ in places]) < 120
    point = one.page.locator("circle.point")
    p = softmax(np.array([3.0, 0, 0]))
    assert float(point.get_attribute("cx")) == pytest.approx(30 * p[0] + 330 * p[1] + 180 * p[2], abs=0.1)
    assert "<b>bird</b>" in one.text("#result") or "a <b>bird" in one.text("#result")  # shown, not interpreted
    assert one.page.locator("#result b").count() == 0
    assert one.page.locator("path.whisker").count() == 3  # the spread over draws, drawn
    assert "JSD" not in one.text("#result")
    one.page.click("#result summary")
    assert "JSD" in one.text("#result") and one.complaints == []


@pytest.mark.browser
def test_inputs_and_words_follow_what_was_seen(visit):
    one = visit("known")
    numbers = [float(v) for v in one.page.input_value("#text-0").split(",")]
    assert all(46 <= v <= 54 for v in numbers) and len(set(numbers)) > 1
    assert one.page.locator("[data-preset=random]").inner_text() == "Like the training data"
    slide = one.page.locator(".field input[type=range]").first
    assert (float(slide.get_attribute("min")), float(slide.get_attribute("max"))) == (42, 58)
    one.predict("1, 1, 1, 1")  # variances .4, so a JSD of .04
    assert "Unfamiliar: more than for 99% of the training inputs" in one.text("#result")
    one.predict("9, 0, 0, 0")
    assert "As among the training inputs: more than for" in one.text("#result") and one.complaints == []


@pytest.mark.browser
def test_other_classifiers_show_bars_and_scores(visit):
    one = visit("ten")
    one.predict("0 0 5 0 0 0 0 0 0 0")
    assert one.text("#result .verdict").startswith("class 2, 94")
    assert one.page.locator("rect.track").count() == 10 and one.page.locator("circle.draw").count() == 0
    assert one.page.locator(".meter").count() == 2
    many = visit("many")
    assert many.page.locator("rect.track").count() == 12  # the most probable


@pytest.mark.browser
def test_regression_shows_the_interval(visit):
    one = visit("regression")
    one.predict("1 1 1 1 1")
    assert one.text("#result .verdict") == "5 ± 1.5"
    assert "95 % interval: 2.06 to 7.94" in one.text("#result")
    assert one.page.locator("#result g").count() == 2  # this one and the first, for comparison
    several = visit("outputs")
    assert several.page.locator("#result g").count() == 4


@pytest.mark.browser
def test_sliders_follow_the_text_and_predict(visit):
    one = visit("regression")
    one.predict("1 1 1 1 1")
    assert one.page.locator(".field").count() == 5
    assert one.page.locator(".field input[type=number]").first.input_value() == "1"
    with one.page.expect_response(lambda r: r.url.endswith("/predict")):
        one.page.locator(".field input[type=number]").first.fill("3")
    one.page.wait_for_timeout(100)
    assert one.text("#result .verdict").startswith("7 ±")
    assert one.page.input_value("#text-0").split(", ")[0] == "3"


@pytest.mark.browser
def test_presets_and_pasted_json(visit):
    one = visit("regression")
    with one.page.expect_response(lambda r: r.url.endswith("/predict")):
        one.page.click("[data-preset=zeros]")
    one.page.wait_for_timeout(100)
    assert one.text("#result .verdict").startswith("0 ±")
    one.predict("[[1,1,1,1,1],[2,2,2,2,2]]")
    assert one.text("#result .verdict").startswith("5 ±") and "first of 2 rows" in one.text("#result")
    two = visit("two inputs")
    two.page.fill("#text-0", "1 2 3")
    two.predict("1 1 1", box=1)
    assert two.text("#result .verdict").startswith("6")


@pytest.mark.browser
def test_mistakes_are_explained(visit):
    one = visit("regression")
    for text, words in (("1 2", "2 numbers; one row has 5"), ("1 2 3 4 x", "“x” is not a number"), ("[1", "JSON")):
        one.page.fill("#text-0", text)
        one.page.click("#predict")
        assert words in one.text("#error"), text
        assert one.text("#result") == "No prediction for this input." and not one.page.locator("#raw").is_visible()
    one.predict("[[1,1,1]]")  # refused by the server
    assert "(1, 3)" in one.text("#error") and one.page.locator("#result svg").count() == 0
    one.predict("1 1 1 1 1")
    assert not one.page.locator("#error").is_visible()
    assert [c for c in one.complaints if "422" not in c] == []  # the browser notes the refused request itself


def test_no_word_of_the_page_calls_agreement_familiar():
    """Far from the data a network may be sure and its draws agree; that says nothing about the input."""
    from favour.serving.script import SCRIPT

    assert "network agrees" not in SCRIPT and "far from the training data they may, and be wrong" in SCRIPT
