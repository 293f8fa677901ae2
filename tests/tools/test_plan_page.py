"""The page of libdc plan --html in Chromium: a mouse hovers, zooms and moves it, and it is the docs' picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, List, Tuple

import numpy as np
import pytest
from libdc import plan as planner
from libdc.plan import page

from browser import Browser, page_of_docs, pixels

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planner.png"
BLOCK = 8  # pixels; a mean over a block hardly changes where an edge is drawn a little differently
LEVELS, SHARE = 16, 0.005  # of 255, and of the blocks: what may differ
TEXTS = """[...document.querySelectorAll("svg text, h1, h2, p, pre, .key")].map(node => {
  const box = node.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom];
})"""


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


def axis(browser: Browser, chart: str) -> List[float]:
    """The times below a chart, in milliseconds."""
    texts = browser.value(f'[...document.querySelectorAll("#{chart} text")].map(node => node.textContent)')
    return [float(text.split()[0]) for text in texts if text.endswith(" ms")]


def place(browser: Browser, chart: str, share: float) -> Tuple[float, float]:
    """A point of a chart's first row."""
    box = browser.value(f'(box => [box.left, box.top, box.width])(document.getElementById("{chart}")'
                        ".getBoundingClientRect())")
    return box[0] + share * box[2], box[1] + 20


def tip(browser: Browser) -> str:
    return str(browser.value('tip.style.display === "block" ? tip.textContent : ""'))


def test_a_mouse_hovers_zooms_and_moves(browser: Browser, plan: planner.Plan) -> None:
    x, y = place(browser, "step", 0.5)
    browser.mouse("mouseMoved", x, y)
    assert " of layers." in tip(browser) and " ms from " in tip(browser)
    browser.mouse("mouseMoved", *browser.value(
        '(box => [box.left + 2, box.bottom - 2])(document.querySelector("#memory rect").getBoundingClientRect())'))
    assert tip(browser).startswith(plan.points[0].moment) and "GiB" in tip(browser)
    browser.mouse("mouseMoved", 5, 5)
    assert tip(browser) == ""

    whole = axis(browser, "step")
    for _ in range(5):
        browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    zoomed = axis(browser, "step")
    assert (zoomed[-1] - zoomed[0]) / (whole[-1] - whole[0]) == pytest.approx(0.8**5, abs=0.02)
    assert axis(browser, "memory") == zoomed and zoomed[0] > 0

    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x - 200, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 200, y, button="left", clickCount=1)
    moved = axis(browser, "step")
    assert moved[0] > zoomed[0] and moved[-1] - moved[0] == pytest.approx(zoomed[-1] - zoomed[0], rel=0.02)

    for click in (1, 2):
        browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=click)
        browser.mouse("mouseReleased", x, y, button="left", clickCount=click)
    assert axis(browser, "step") == axis(browser, "memory") == whole


def test_each_figure_is_drawn(browser: Browser, plan: planner.Plan) -> None:
    def count(selector: str) -> int:
        return int(browser.value(f'document.querySelectorAll("{selector}").length'))

    assert count("#memory rect") == sum(size > 0 for point in plan.points for size in point.bytes.values())
    assert count("#step rect") == sum(span.end_ns > span.begin_ns for span in plan.spans)
    assert count("#scale circle") == 17 and count("#scale polyline") == 1


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
    ("(bottom - top) * bytes / most", "(bottom - top) * bytes / most * 0.97"),  # memory is 3 % too low
    ("(bottom - top) * share", "(bottom - top) * share * 0.95"),
    ("#228833", "#882233"),
    ("\ndrawScale();", ""),
])
def test_a_fault_in_the_page_is_seen(chromium: Browser, plan: planner.Plan, tmp_path: Path, before: str, after: str
                                     ) -> None:
    text = page.page(plan)
    assert text.count(before) == 1
    path = tmp_path / "plan.html"
    path.write_text(text.replace(before, after))
    chromium.open(path)
    assert differs(chromium) > 2 * SHARE
