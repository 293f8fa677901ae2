"""The page of libdc plan --html in Chromium: a mouse hovers, zooms, moves and hides, and it is the docs' picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest
from libdc import plan as planner
from libdc.plan import page

from browser import SIZE, Browser, page_of_docs, pixels

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planner.png"
BLOCK = 8  # pixels; a mean over a block hardly changes where an edge is drawn a little differently
LEVELS, SHARE = 16, 0.005  # of 255, and of the blocks: what may differ
TEXTS = """[...document.querySelectorAll(".u-axis, .u-label, .u-value, h1, h2, p")].map(node => {
  const box = node.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom];
})"""
MILLISECOND, GIB = 1e6, 2.0**30


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    return page_of_docs()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture
def browser(chromium: Browser, plan: planner.Plan, tmp_path: Path) -> Browser:
    path = tmp_path / "plan.html"
    page.write(plan, str(path))
    chromium.open(path)
    return chromium


def scale(browser: Browser, chart: str, name: str = "x") -> List[float]:
    """The first and the last value that an axis shows."""
    return list(browser.value(f"(({{min, max}}) => [min, max])(charts.{chart}.scales.{name})"))


def places(browser: Browser, chart: str, values: List[float], name: str = "x") -> List[float]:
    """Pixels of the window at which values of an axis are."""
    edge = "left" if name == "x" else "top"
    return list(browser.value(f"{values}.map(value => charts.{chart}.valToPos(value, '{name}') + "
                              f"charts.{chart}.over.getBoundingClientRect().{edge})"))


def middle(browser: Browser, chart: str) -> float:
    return float(browser.value(f"(box => (box.top + box.bottom) / 2)(charts.{chart}.over.getBoundingClientRect())"))


def hover(browser: Browser, chart: str, x: float) -> None:
    browser.mouse("mouseMoved", places(browser, chart, [x])[0], middle(browser, chart))


def legend(browser: Browser, chart: str) -> Dict[str, str]:
    return dict(browser.value(f"""[...charts.{chart}.root.querySelectorAll(".u-series")].map(
        row => [".u-label", ".u-value"].map(name => row.querySelector(name).textContent))"""))


def click(browser: Browser, x: float, y: float, count: int = 1) -> None:
    for number in range(1, count + 1):
        browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=number)
        browser.mouse("mouseReleased", x, y, button="left", clickCount=number)


def click_name(browser: Browser, chart: str, name: str) -> None:
    click(browser, *browser.value(f"""(box => [(box.left + box.right) / 2, (box.top + box.bottom) / 2])(
        [...charts.{chart}.root.querySelectorAll(".u-label")].find(node => node.textContent === "{name}")
        .getBoundingClientRect())"""))


def drag(browser: Browser, chart: str, begin: float, end: float) -> None:
    (left, right), y = places(browser, chart, [begin, end]), middle(browser, chart)
    browser.mouse("mouseMoved", left, y)
    browser.mouse("mousePressed", left, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", right, y, button="left", buttons=1)
    browser.mouse("mouseReleased", right, y, button="left", clickCount=1)


def check_figures(browser: Browser, plan: planner.Plan, time_ns: float) -> None:
    """The legends of both charts of time have what the plan says of that time."""
    point = next(point for point in plan.points if point.time_ns >= time_ns)
    shown = legend(browser, "memory")
    assert shown.pop("moment").startswith(f"{point.moment} at ")
    assert float(shown.pop("limit").split()[0]) == pytest.approx(plan.machine.memory_bytes / GIB, rel=0.006)
    assert {name: float(text.split()[0]) for name, text in shown.items()} == {
        name: pytest.approx(size / GIB, rel=0.006) for name, size in point.bytes.items()}

    current = {span.stream: span for span in plan.spans if span.begin_ns <= time_ns < span.end_ns}
    for stream in ("compute", "gather", "reduce", "offload", "reload"):
        text = legend(browser, "step")[stream]
        if stream not in current:
            assert text == "--"
            continue
        what, length, begin = re.fullmatch(r"(.*), (\S+) ms from (\S+) ms", text).groups()  # type: ignore[union-attr]
        span = current[stream]
        assert what == span.what and float(begin) == pytest.approx(span.begin_ns / MILLISECOND, rel=0.006)
        assert float(length) == pytest.approx((span.end_ns - span.begin_ns) / MILLISECOND, rel=0.006)


def longest(plan: planner.Plan) -> Any:
    return max((span for span in plan.spans if span.stream == "compute"), key=lambda span: span.end_ns - span.begin_ns)


def test_a_mouse_over_a_chart_shows_its_figures(browser: Browser, plan: planner.Plan) -> None:
    span = longest(plan)
    for chart in ("step", "memory"):
        for time_ns in (span.begin_ns + 2 * MILLISECOND, span.end_ns - 2 * MILLISECOND, 0.99 * plan.step_ns):
            hover(browser, chart, time_ns / MILLISECOND)
            check_figures(browser, plan, time_ns)
    hover(browser, "scale", 1100)
    assert legend(browser, "scale")["ranks"] == "1,024"
    assert float(legend(browser, "scale")["efficiency"].split()[0]) == pytest.approx(
        100 * page.figures(plan)["scale"][10]["efficiency"], rel=0.006)
    browser.mouse("mouseMoved", 5, 5)
    assert set(legend(browser, "memory").values()) == set(legend(browser, "scale").values()) == {"--"}


def test_dragging_zooms_and_a_double_click_shows_all(browser: Browser, plan: planner.Plan) -> None:
    whole, span = scale(browser, "step"), longest(plan)
    assert scale(browser, "memory") == whole and whole[0] == 0
    assert whole[1] == pytest.approx(plan.step_ns / MILLISECOND, rel=0.001)
    begin, length = span.begin_ns / MILLISECOND, (span.end_ns - span.begin_ns) / MILLISECOND
    for chart in ("step", "memory"):
        pixel = whole[1] / 1000
        drag(browser, chart, 0.1 * whole[1], 0.6 * whole[1])
        assert scale(browser, "step") == pytest.approx([0.1 * whole[1], 0.6 * whole[1]], abs=2 * pixel)
        drag(browser, chart, begin + 0.25 * length, begin + 0.75 * length)  # no operation begins or ends in it
        assert scale(browser, "step") == pytest.approx([begin + 0.25 * length, begin + 0.75 * length], abs=2 * pixel)
        assert scale(browser, "memory") == pytest.approx(scale(browser, "step"))
        hover(browser, chart, begin + length / 2)
        check_figures(browser, plan, (begin + length / 2) * MILLISECOND)
        click(browser, places(browser, chart, [begin + length / 2])[0], middle(browser, chart), count=2)
        assert scale(browser, "step") == scale(browser, "memory") == whole


def test_the_wheel_zooms_and_moves(browser: Browser) -> None:
    def turn(times: int, chart: str, **deltas: int) -> None:
        x, y = places(browser, chart, [sum(scale(browser, chart)) / 2])[0], middle(browser, chart)
        for _ in range(times):
            browser.mouse("mouseWheel", x, y, **{"deltaX": 0, "deltaY": 0, **deltas})

    whole = scale(browser, "step")
    for chart in ("step", "memory"):
        turn(5, chart, deltaY=-100)
        zoomed = scale(browser, "step")
        assert zoomed[1] - zoomed[0] == pytest.approx(whole[1] * 0.8**5, rel=0.001)
        assert sum(zoomed) == pytest.approx(whole[1], rel=0.001)
        turn(2, chart, deltaX=100)
        assert scale(browser, "step") == pytest.approx([x + (zoomed[1] - zoomed[0]) / 4 for x in zoomed])
        turn(20, chart, deltaX=-100)
        assert scale(browser, "step") == pytest.approx([0, zoomed[1] - zoomed[0]], abs=1e-6)
        assert scale(browser, "memory") == scale(browser, "step")
        turn(20, chart, deltaY=100)
        assert scale(browser, "step") == scale(browser, "memory") == whole
        drag(browser, chart, 800, 800 + whole[1] / 1000)
        turn(60, chart, deltaY=-100)
        assert scale(browser, "memory")[1] - scale(browser, "memory")[0] == pytest.approx(whole[1] / 1e6, rel=1e-3)
        click(browser, places(browser, chart, [sum(scale(browser, chart)) / 2])[0], middle(browser, chart), count=2)
        assert scale(browser, "step") == scale(browser, "memory") == whole


def test_a_click_on_a_name_hides_it(browser: Browser, plan: planner.Plan) -> None:
    tops, totals = scale(browser, "memory", "y"), [point.total / GIB for point in plan.points]
    assert tops == pytest.approx([0, 1.1 * max(totals)])
    drag(browser, "memory", 100, 1000)
    zoomed = scale(browser, "memory")
    click_name(browser, "memory", "activations")
    less = max(point.total - point.bytes["activations"] for point in plan.points) / GIB
    assert scale(browser, "memory", "y") == pytest.approx([0, 1.1 * less]) and scale(browser, "memory") == zoomed
    assert browser.value("charts.step.series.every(one => one.show)")
    click_name(browser, "memory", "activations")
    assert scale(browser, "memory", "y") == tops


def test_charts_are_as_wide_as_the_window(browser: Browser) -> None:
    script = "Object.values(charts).map(chart => [chart.width, chart.root.parentNode.clientWidth])"
    before = browser.value(script)
    try:
        browser.resize(800, SIZE[1])
        assert all(width == place < before[0][0] for width, place in browser.value(script))
    finally:
        browser.resize(*SIZE)
    assert browser.value(script) == before


def colors(browser: Browser, chart: str) -> "Dict[str, np.ndarray[Any, Any]]":
    named = browser.value(f"charts.{chart}.series.filter(one => one._fill).map(one => [one.label, one._fill])")
    return {name: np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) for name, code in named}


def test_each_figure_is_drawn(browser: Browser, plan: planner.Plan) -> None:
    assert browser.value('performance.getEntriesByType("resource").length') == 0
    assert browser.value("Object.keys(charts)") == ["memory", "step", "scale"]
    shown = pixels(browser.picture()).astype(int)

    fills = colors(browser, "memory")
    assert list(fills) == list(plan.points[0].bytes)[::-1]
    top, one, bottom = places(browser, "memory", [scale(browser, "memory", "y")[1], 1, 0], "y")
    begins = [0.0, *(point.time_ns for point in plan.points)]
    edges = places(browser, "memory", [begin / MILLISECOND for begin in begins])
    wide = [(point, round((left + right) / 2)) for point, left, right in zip(plan.points, edges, edges[1:])
            if right - left > 3]
    assert len(wide) > 60
    for point, x in wide:
        column = shown[round(top) : round(bottom), x]
        for name, fill in fills.items():
            height = point.bytes[name] / GIB * (bottom - one)
            assert (column == fill).all(axis=1).sum() == pytest.approx(height, abs=2.1)

    fills = colors(browser, "step")
    lanes = dict(zip(fills, (round(y) for y in places(browser, "step", list(range(len(fills))), "y"))))
    first, last = (round(x) for x in places(browser, "step", scale(browser, "step")))
    for stream, fill in fills.items():
        own = [span for span in plan.spans if span.stream == stream]
        times = [time / MILLISECOND for span in own for time in (span.begin_ns, span.end_ns)]
        edges = places(browser, "step", times) if times else []
        drawn = (shown[lanes[stream] + 3, first:last] == fill).all(axis=1)
        expected = np.zeros(last - first)
        for left, right in zip(edges[::2], edges[1::2]):
            expected[max(0, int(left) - first) : int(np.ceil(right)) - first] = 1
            if right - left > 4:
                assert drawn[int(left) + 1 - first : int(right) - 1 - first].all()
        assert not (drawn & (expected == 0)).any()

    ranks = [entry["ranks"] for entry in page.figures(plan)["scale"]]
    shares = [100 * entry["efficiency"] for entry in page.figures(plan)["scale"]]
    xs, ys = places(browser, "scale", ranks), places(browser, "scale", shares, "y")
    assert all((shown[round(y), round(x)] == (0x44, 0x77, 0xAA)).all() for x, y in zip(xs, ys))


def test_one_rank_has_a_limit_and_no_scaling(chromium: Browser, plan: planner.Plan, tmp_path: Path) -> None:
    alone = planner.run(plan.model, plan.machine, planner.Options(recompute=True), traced=True)
    assert not alone.fits
    path = tmp_path / "plan.html"
    page.write(alone, str(path))
    chromium.open(path)
    assert chromium.value("Object.keys(charts)") == ["memory", "step"]
    y = round(places(chromium, "memory", [plan.machine.memory_bytes / GIB], "y")[0])
    first, last = (round(x) for x in places(chromium, "memory", scale(chromium, "memory")))
    line = (pixels(chromium.picture())[y - 1 : y + 2, first:last] == (0xCC, 0, 0)).all(axis=2).any(axis=0)
    assert 0.3 < line.mean() < 0.7  # dashes


def blocks(picture: "np.ndarray[Any, Any]", texts: List[List[float]]) -> "np.ndarray[Any, Any]":
    """Means of blocks. Texts are blank, since fonts differ."""
    shown = picture.copy()
    for left, top, right, bottom in texts:
        shown[max(0, int(top) - 1) : int(bottom) + 2, max(0, int(left) - 1) : int(right) + 2] = 255
    rows, columns = (length // BLOCK for length in shown.shape[:2])
    return shown[: rows * BLOCK, : columns * BLOCK].reshape(rows, BLOCK, columns, BLOCK, 3).mean(axis=(1, 3))


def differs(browser: Browser) -> float:
    """The share of blocks that are not those of the docs' picture."""
    texts, now, before = browser.value(TEXTS), pixels(browser.picture()), pixels(DOCS.read_bytes())
    assert now.shape == before.shape
    return float((np.abs(blocks(now, texts) - blocks(before, texts)).max(axis=2) > LEVELS).mean())


def test_the_picture_is_the_docs(browser: Browser) -> None:
    """python tests/tools/browser.py docs/planner.png makes it anew."""
    assert differs(browser) <= SHARE


@pytest.mark.parametrize("before, after", [
    ("[0, 1.1 * Math", "[0, 1.14 * Math"),  # memory is 3 % too low
    ("range: [0, 100]", "range: [0, 105]"),
    ("#228833", "#882233"),
    ("{dir: -1, range", "{range"),  # the lanes are upside down
    ("\nif (data.scale.length > 0) drawScale();", ""),
])
def test_a_fault_in_the_page_is_seen(chromium: Browser, plan: planner.Plan, tmp_path: Path, before: str, after: str
                                     ) -> None:
    text = page.page(plan)
    assert text.count(before) == 1
    path = tmp_path / "plan.html"
    path.write_text(text.replace(before, after))
    chromium.open(path)
    assert differs(chromium) > 2 * SHARE
