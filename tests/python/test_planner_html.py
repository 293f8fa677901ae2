"""libdc plan --html: one file without a network, with the plan's figures and the spans of the step."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest
from libdc import plan as planner
from libdc.plan import page

LAYERS = {"tokens": 512, "layers": [{"name": "</script><b>", "shapes": [[4096, 1024], [4096]], "flops": 1 << 32,
                                     "kept_bytes": 5 << 20, "input_bytes": 1 << 20, "repeat": 4}]}


class Page(HTMLParser):
    """Its ids, and everything that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: List[str] = []
        self.fetched: List[str] = []
        self.open: List[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: "List[Tuple[str, Optional[str]]]") -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def model() -> planner.Model:
    return planner.from_layers(LAYERS, "layers")


def data_of(text: str) -> Dict[str, Any]:
    found = re.search(r'type="application/json">(.*?)</script>', text, re.S)
    assert found is not None
    return dict(json.loads(found.group(1)))


def test_spans_are_the_steps_work() -> None:
    machine, options = planner.load("h100"), planner.Options(ranks=8, micro_batch=8, offload=True)
    plan = planner.run(model(), machine, options, traced=True)
    assert plan.step_ns == planner.run(model(), machine, options).step_ns
    assert {span.stream for span in plan.spans} == {"compute", "gather", "reduce", "offload", "reload"}
    assert all(0 <= span.begin_ns < span.end_ns <= plan.step_ns + 10 for span in plan.spans)
    compute = [span for span in plan.spans if span.stream == "compute"]
    assert len(compute) == 2 * 4 and sum(span.end_ns - span.begin_ns for span in compute) <= plan.compute_ns
    assert all(a.end_ns <= b.begin_ns for a, b in zip(compute, compute[1:]))


def test_the_page_is_whole_and_fetches_nothing() -> None:
    plan = planner.run(model(), planner.load("h100"), planner.Options(ranks=8), traced=True)
    text = page.page(plan)
    parsed, data = Page(text), data_of(text)
    assert parsed.open == [] and parsed.fetched == []
    assert "@" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    drawn = set(re.findall(r'(?:getElementById|drawOverTime|draw)\("(\w+)"', text))
    assert drawn == {"data", "memory", "step", "scale"} == set(parsed.ids)
    assert [sum(point["bytes"]) for point in data["points"]] == [point.total for point in plan.points]
    assert len(data["spans"]) == len(plan.spans) and data["spans"][0][3] == plan.spans[0].what
    assert [entry["ranks"] for entry in data["scale"]][-1] == 65536
    assert "</script><b>" not in text


def test_uplot_is_the_release_and_each_page_has_its_licence() -> None:
    about = (page.UPLOT / "README.md").read_text(encoding="utf-8")
    files = {path.name: path.read_bytes() for path in page.UPLOT.iterdir() if path.name != "README.md"}
    assert dict(re.findall(r"^\| `([\w.]+)` \| .* \| (\w{64}) \|$", about, re.M)) == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    version = re.search(r"https://github.com/leeoniya/uPlot \(v([\d.]+)\)", files["uPlot.iife.js"].decode())
    assert version is not None and f"tag `{version[1]}`" in about
    text = page.page(planner.run(model(), planner.load("h100"), planner.Options(), traced=True))
    assert all(data.decode() in text for data in files.values())


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "libdc", "plan", *arguments], text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=600)


def test_the_command(tmp_path: Path) -> None:
    source, out = tmp_path / "model.json", tmp_path / "plan.html"
    source.write_text(json.dumps(LAYERS))
    done = command(str(source), "--html", str(out))
    assert done.returncode == 0 and "time of a step" in done.stdout and len(data_of(out.read_text())["points"]) == 9
    for arguments, text in ((["--html", f"{tmp_path}/none/plan.html"], "none/plan.html cannot be written"),
                            (["--html", f"{source}/plan.html"], "model.json/plan.html cannot be written"),
                            (["--html", ""], "html =  cannot be written"),
                            (["--html", str(out), "--search"], "without --search")):
        done = command(str(source), *arguments)
        assert done.returncode == 2 and text in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "plan.html"]


def test_the_compiled_tool_plans_a_layer_wherever_the_word_is() -> None:
    """Its help shows the options first."""
    lines = [command("layer", "--model", "bert-base"), command("--model", "bert-base", "layer")]
    assert [done.returncode for done in lines] == [0, 0] and lines[0].stdout == lines[1].stdout, lines[1].stderr
    assert "unrecognized arguments: --layers" in command("model.json", "--layers", "3").stderr


def test_a_rank_alone_has_no_scaling() -> None:
    plan = planner.run(model(), planner.load("h100"), planner.Options(), traced=True)
    assert page.figures(plan)["scale"] == []
    with pytest.raises(ValueError, match="cannot be written"):
        page.write(plan, "/proc/none/plan.html")


@pytest.mark.parametrize("letter", [b"\xff", b"\x1b"])
def test_a_model_s_file_may_have_any_name(tmp_path: Path, letter: bytes) -> None:
    path, out = os.fsdecode(os.fsencode(tmp_path) + b"/" + letter + b".json"), tmp_path / "page.html"
    with open(path, "w") as file:
        json.dump({"layers": [{"shapes": [[64, 64]], "kept_bytes": 64}]}, file)
    done = command(path, "--html", str(out))
    assert done.returncode == 0 and done.stdout.startswith("?: 4,096 parameters"), done.stderr
    assert "<title>libdc plan: ?</title>" in out.read_text(encoding="utf-8")
