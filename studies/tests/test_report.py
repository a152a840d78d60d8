"""The report from small made-up results: every figure, table and sentence is there, and says what the numbers say."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browsing import assert_page_fits, started
from made_up_results import ALL, boot, classification, jsd, ood

from favour.errors import CorruptFile, FavourError, InvalidValue
from favour.pages import Axis, fences
from favour_studies.report import build
from favour_studies.report.load import load
from favour_studies.report.readme import main_table

RESULTS = Path(__file__).resolve().parents[2] / "results" / "paper"
VOID = {"meta", "link", "br", "path", "img", "hr"}


FIGURES = ["worth", "classification-nll", "classification-mnist", "classification-cifar10", "regression-nll"]
FIGURES += ["regression-boston", "regression-energy", "ood", "jsd", "sine", "simplex"]
TABLES = ["headline-table", "worth-table", "tallies-table", "runs-table", "trainings-table", "table-classification"]
TABLES += ["table-regression", "table-all-regression-boston-dropout10"]
TABLES += ["table-all-classification-mnist-dropout10", "classification-bootstrap", "regression-bootstrap"]
TABLES += ["table-all-regression-boston-dropout10-validation", "table-ood-1", "table-ood-2", "table-ood-3"]
TABLES += ["ood-bootstrap", "table-jsd", "table-jsd-error", "table-simplex"]


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, **{name: make() for name, make in ALL.items()})


class Page(HTMLParser):
    """Ids by tag, the text of each element with an id, and whether tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.words, self.links = [], {}, {}, []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[k] for k in ("src", "href", "xlink:href") if k in given]
        if "id" in given:
            assert given["id"] not in self.ids, f"id {given['id']} twice"
            self.ids[given["id"]] = tag
        if tag not in VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append((tag, given.get("id")))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data):
        for _, name in self.open:
            if name:
                self.words[name] = self.words.get(name, "") + data


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def test_every_figure_and_table_is_there(folder):
    page = read(build(folder))
    assert [n for n in FIGURES if page.ids.get(f"figure-{n}") != "figure"] == []
    assert [n for n in TABLES if page.ids.get(n) != "table"] == []
    for name in ("headline", "runs", *ALL):
        assert page.ids[name] == "section" and f"#{name}" in page.links


def test_page_needs_nothing_from_elsewhere(folder):
    text = build(folder).read_text()
    assert all(link.startswith(("#", "data:")) for link in Page(text).links)
    assert not re.search(r"https?://|@import|url\(", text)
    assert text.count("<script") == 1 and "default-src 'none'" in text


def test_headline_says_where_sampling_wins(folder):
    words = read(build(folder)).words
    assert "≥ 1,000" in words["worth-table"] and "better in NLL, ECE" in words["headline-table"]
    assert "AUROC of JSD ≤ 1*" in words["worth-table"]  # few samples are better, those of equal time are not: no equal
    assert "45.7" not in words["headline"] and "46×" in words["worth-table"]  # 640 samples for the time of 14
    assert "In 4 of 6 settings a pass matches more samples than fit into its time" in words["figure-worth"]


def cells(text, table):
    """Rows of a table as they are read: the title of the column, and what stands in it."""
    body = re.search(rf'id="{table}".*?<tbody>(.*?)</tbody>', text, re.DOTALL)[1]
    found = []
    for line in body.split("</tr>"):
        given = re.findall(r'<t[hd][^>]*data-label="([^"]*)"[^>]*>(.*?)</t[hd]>', line)
        if given:
            found.append({title: re.sub(r"<[^>]*>", "", words) for title, words in given})
    return found


def test_every_estimator_is_judged_with_its_cost(folder):
    path = build(folder)
    page, rows = read(path), cells(path.read_text(), "tallies-table")
    by = {(row["Measure"], row["Estimator"]): row for row in rows}
    few, many = (by["Classification: NLL", name] for name in ("192 draws", "many draws"))
    assert few["Not worse"] == "0 of 1" and few["Worst, by"] == "0.0020 (Mnist, MLP, dropout 10%)"
    assert (few["Needs forwards"], few["Needs samples"]) == ("2", "14")
    assert many["Not worse"] == "1 of 1" and many["Needs forwards"] == "5" and many["Worst, by"] == "–"
    assert by["Classification: NLL", "fresh samples"]["Needs forwards"] == "300"
    assert by["Classification: ECE", "–"]["Worst, by"] == "0.0020 (Cifar10, MLP, dropout 10%)"
    assert by["Regression: NLL", "–"]["Better"] == "2"
    assert by["Unfamiliar inputs: AUROC of JSD", "–"]["Goal"] == "2: not met"
    assert (
        "One pass with many draws needs the time of 14 samples and matches 640 samples" in page.words["classification"]
    )
    assert "a timed CPU, 2 threads" in page.words["runs"]
    table = page.words["classification-bootstrap"]
    assert "many draws" in table and "fresh samples" in table


def test_cells_carry_the_title_of_their_column(folder):
    rows = cells(build(folder).read_text(), "table-ood-2")
    assert rows[0]["JSD: paper"] == "–" and rows[1]["JSD: ours"].startswith("91.2")
    assert "Network" in rows[0] and "Network" not in rows[1] and rows[3]["Network"] == "DO 10%"  # spans three rows


def test_readings_follow_the_numbers(folder):
    before = read(build(folder)).words
    assert "The goal was 2: not met." in before["ood"] and "worse by 0.0020" in before["ood"]
    changed = ood()
    changed["summary"]["not_worse"] = 2
    for model in changed["pairs"][0]["models"]:
        model["bootstrap"] = [boot("auroc", "better", score="jsd")]
    write(folder, ood=changed)
    after = read(build(folder)).words["ood"]
    assert "The goal was 2: met." in after and "worse by" not in after
    assert "2 of them better" in after


def test_a_goal_is_told_of_the_method_it_is_set_for(folder):
    changed = ood()
    changed["summary"] |= {"ours": "many draws"}
    for model in changed["pairs"][0]["models"]:
        first = boot("auroc", "worse", score="jsd")
        model["bootstrap"] = [
            first,
            boot("auroc", "better", score="jsd_many", ours="many draws", estimator="many draws"),
        ]
    write(folder, ood=changed)
    words = read(build(folder)).words["ood"]
    assert words.count("The goal was 2") == 1 and "by many draws: not worse than 1,000 samples in 2 of 2" in words


def test_trainings_and_unfinished_runs_are_told(folder):
    words = read(build(folder)).words["runs"]
    assert "10% of the paper's epochs" in words and "abc1234" in words
    assert "Not finished when this was written: Calibration, regression" in words


def test_paper_numbers_stand_beside_ours(folder):
    words = read(build(folder)).words
    assert "91.2 ±1.0" in words["table-ood-1"] and "77.7 ±0.3" in words["table-ood-1"]
    assert "Not run: no network <here>" in words["table-ood-2"]
    assert "77.7" not in words["table-ood-3"]


def test_missing_experiment_says_how_to_run_it(tmp_path):
    words = read(build(write(tmp_path, jsd=jsd()))).words
    assert "favour reproduce ood --profile quick --data DATA" in words["ood"]
    assert "was not run" in words["classification"] and "was not run" not in words["jsd"]
    assert "headline" not in words


def test_missing_numbers_are_dashes(folder):
    content = classification()
    row = content["tasks"][0]["methods"][1]
    row["metrics"]["nll"], row["time"] = None, None
    content["tasks"][0]["headline"] |= {"forwards": None, "cached_samples": None, "naive_samples": None}
    content["tasks"][0]["bootstrap"] = []
    words = read(build(write(folder, classification=content))).words
    assert "a time that was not measured" in words["classification"]


def test_cut_off_file_is_named(folder):
    path = folder / "ood.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(CorruptFile, match=r"ood\.json"):
        build(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    "change", [{"pairs": [{"id": "x"}]}, {"format": 99}, {"experiment": "jsd"}, {"scores": None}, {"environment": 3}]
)
def test_wrong_layout_is_named(folder, change):
    write(folder, ood=ood() | change)
    with pytest.raises(CorruptFile, match=r"ood\.json"):
        build(folder)


def test_missing_key_and_wrong_type_are_named(folder):
    content = jsd()
    del content["panels"]
    write(folder, jsd=content)
    with pytest.raises(CorruptFile, match=r"jsd\.json has no panels"):
        build(folder)
    write(folder, jsd=[1, 2])
    with pytest.raises(FavourError, match=r"jsd\.json should hold an object"):
        build(folder)


def test_empty_and_missing_folders(tmp_path):
    with pytest.raises(InvalidValue, match="holds none of"):
        build(tmp_path)
    with pytest.raises(InvalidValue, match="no folder"):
        build(tmp_path / "nowhere")


def test_figures_are_files_too(folder):
    out = build(folder, folder / "elsewhere" / "page.html")
    assert out == folder / "elsewhere" / "page.html"
    names = {path.stem for path in (out.parent / "figures").iterdir()}
    assert names == {"classification-accuracy", "classification-ece", "classification-nll", "jsd", "sine", "simplex"}
    for path in (out.parent / "figures").iterdir():
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_table_of_the_documentation(folder):
    text = main_table(load(folder))
    ours = "| Classification: Mnist, MLP, dropout 10% | NLL | 64 | 14 | 5.2 | worse than 1,000 samples |"
    assert f"{ours} 640 | 14 | not worse than 1,000 samples |" in text and "| many draws: matched |" in text
    assert "sampling of equal time wins" in text


def test_ticks_are_distinct_and_inside():
    for low, high in ((0, 1), (47.5, 58.1), (-3, 3), (0.0, 4e-5), (5.7321, 5.7336), (960, 12000)):
        ticks = Axis(low, high).ticks()
        labels = [label for _, label in ticks]
        assert len(ticks) >= 3 and len(set(labels)) == len(labels)
        assert all(low - 1e-9 <= v <= high + 1e-9 for v, _ in ticks)
        if low > 1:
            assert all(abs(float(label.replace(",", "")) - v) < 1e-9 for v, label in ticks)
    assert [v for v, _ in Axis(1, 1000, log=True).ticks()] == pytest.approx([1, 10, 100, 1000])


def test_fences_leave_out_far_values_but_keep_what_is_asked():
    values = [1.0, 1.1, 1.2, 1.3, 50.0]
    assert fences(values) == (1.0, 1.3)
    assert fences(values, [50.0]) == (1.0, 50.0)


@pytest.mark.browser
def test_page_fits(folder):
    with started() as browser:
        assert_page_fits(browser, build(folder))


@pytest.mark.browser
@pytest.mark.skipif(not (RESULTS / "classification.json").exists(), reason="no results of a full run here")
def test_page_of_the_full_run_fits_and_is_short_while_folded(tmp_path):
    with started() as browser:
        path = build(RESULTS, tmp_path / "report.html")
        page = browser.new_page(viewport={"width": 1280, "height": 850})
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollHeight") < 12_000
        page.close()
        assert_page_fits(browser, path)


@pytest.mark.browser
def test_titles_of_columns_sort(folder):
    with started() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 850})
        page.goto(build(folder).as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")

        def column(table, title):
            return page.locator(f'#{table} tbody [data-label="{title}"]').all_inner_texts()

        before = column("worth-table", "Needs samples"), column("worth-table", "Gain")
        title = page.locator('#worth-table thead [data-label="Gain"]')
        title.click()
        gains = [float(re.sub("[^0-9.]", "", g)) for g in column("worth-table", "Gain") if g != "–"]
        assert gains == sorted(gains) and len(gains) > 3 and column("worth-table", "Gain")[-1] == "–"
        assert len(column("worth-table", "Setting")) == len(before[1])  # each row says its setting now
        title.press("Enter")
        assert [float(re.sub("[^0-9.]", "", g)) for g in column("worth-table", "Gain") if g != "–"] == gains[::-1]
        assert title.get_attribute("aria-sort") == "descending"
        title.click()
        assert (column("worth-table", "Needs samples"), column("worth-table", "Gain")) == before
        page.locator("#table-all-classification-mnist-dropout10 thead").scroll_into_view_if_needed()
        box = page.locator(".scroll", has=page.locator("#headline-table"))
        box.evaluate("b => { b.style.maxHeight = '120px'; b.scrollTop = 90; }")
        top, head = box.bounding_box()["y"], page.locator("#headline-table thead").bounding_box()["y"]
        assert abs(head - top) < 3  # the titles stay while the rows move
        page.close()
