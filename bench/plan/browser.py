#!/usr/bin/env python3
"""The page of libdc plan --html in Chromium, headless: it draws, hovers, zooms, moves and shows all again.

    python bench/plan/browser.py [--picture docs/planner.png]

Debian's package chromium has the browser. CI has none, since it is too large; it checks the page's structure."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from libdc import plan as planner
from libdc.plan import page
from libdc.plan.hugging_face import from_config
from scale import config

ACTIONS = """<script>
const said = {}, memory = document.getElementById("memory"), step = document.getElementById("step");
const box = step.getBoundingClientRect();
const at = share => ({clientX: box.left + box.width * share, clientY: box.top + 20, bubbles: true, cancelable: true});
const texts = svg => [...svg.querySelectorAll("text")].map(node => node.textContent);
const axis = svg => texts(svg).filter(text => text.endsWith(" ms"));
said.rectangles = [memory.querySelectorAll("rect").length, step.querySelectorAll("rect").length];
said.circles = document.querySelectorAll("#scale circle").length;
said.before = axis(step);
memory.querySelector("rect").dispatchEvent(new MouseEvent("mousemove", at(0.5)));
said.tip = [document.getElementById("tip").style.display, document.getElementById("tip").textContent];
for (let i = 0; i < 5; i++) step.dispatchEvent(new WheelEvent("wheel", {...at(0.5), deltaY: -100}));
said.zoomed = [axis(step), axis(memory)];
step.dispatchEvent(new PointerEvent("pointerdown", {...at(0.5), buttons: 1}));
step.dispatchEvent(new PointerEvent("pointermove", {...at(0.3), buttons: 1}));
dispatchEvent(new PointerEvent("pointerup", at(0.3)));
said.moved = axis(step);
step.dispatchEvent(new MouseEvent("dblclick", at(0.5)));
said.after = axis(step);
document.body.innerHTML = "<pre id=said></pre>";
document.getElementById("said").textContent = JSON.stringify(said);
</script></body>"""


def chromium(*arguments: str) -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
    done = subprocess.run([program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments],
                          text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"browser: {done.stderr[-800:]}")
    return done.stdout


def milliseconds(labels: "list[str]") -> float:
    return float(labels[-1].split()[0]) - float(labels[0].split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", help="a PNG that is written")
    arguments = parser.parse_args()
    model = from_config(config("8B"), "Llama-3-8B", 8192, 2)
    plan = planner.run(model, planner.load("h100"), planner.Options(ranks=64, recompute=True), traced=True)
    with tempfile.TemporaryDirectory() as folder:
        plain, acting = Path(folder) / "plan.html", Path(folder) / "acting.html"
        plain.write_text(page.page(plan))
        acting.write_text(page.page(plan).replace("</body>", ACTIONS))
        dom = chromium("--dump-dom", f"file://{acting}")
        found = re.search(r'<pre id="said">(.*?)</pre>', dom, re.S)
        if found is None:
            raise SystemExit("browser: the page's script failed")
        said = json.loads(found.group(1).replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
        if arguments.picture:
            chromium(f"--screenshot={Path(arguments.picture).resolve()}", "--window-size=1140,1120", f"file://{plain}")
    checks = {
        "both charts have a rectangle for each figure": said["rectangles"][0] >= len(plan.points)
        and said["rectangles"][1] >= 0.9 * len(plan.spans),
        "the curve has 17 numbers of ranks": said["circles"] == 17,
        "hovering tells a moment": said["tip"][0] == "block" and plan.points[0].moment in said["tip"][1],
        "the wheel zooms to a third":
            abs(milliseconds(said["zoomed"][0]) / milliseconds(said["before"]) - 0.8**5) < 0.02,
        "both charts zoom": said["zoomed"][0] == said["zoomed"][1],
        "dragging moves": said["moved"] != said["zoomed"][0]
        and abs(milliseconds(said["moved"]) - milliseconds(said["zoomed"][0])) < 0.02 * milliseconds(said["before"]),
        "a double click shows all": said["after"] == said["before"],
    }  # fmt: skip
    for text, held in checks.items():
        print(f"{'yes' if held else 'NO '} {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
