"""libdc plan layer: its figures are the library's, with the tutorial's table beside them; both outputs agree."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List

import pytest
from libdc.transformer import LayerConfig, plan

from conftest import Run

FLAGS = ("normalize_invertible", "attn_dropout_checkpoint", "gelu_checkpoint")


def flags_of(row: Dict[str, Any]) -> Dict[str, bool]:
    return {name: row[name] for name in FLAGS}


@pytest.mark.parametrize("line, dtype, more", [
    ([], "float16", {}),
    (["--model", "bert-base", "--stage", "2", "--ranks", "8", "--optimizer", "momentum"], "float16",
     {"stage": 2, "ranks": 8, "moments": 1}),
    (["--dtype", "float32", "--optimizer", "sgd", "--seq", "77,384", "--memory", "8,24,80"], "float32", {"moments": 0}),
    (["--hidden", "2048", "--heads", "32", "--layers", "3", "--dtype", "bfloat16", "--stage", "3", "--ranks", "64",
      "--other", "2"], "bfloat16", {"stage": 3, "ranks": 64, "other_bytes": 2 << 30}),
], ids=["bert-large", "bert-base", "float32", "own"])
def test_18_figures_are_the_librarys(dc: Run, line: List[str], dtype: str, more: Dict[str, int]) -> None:
    told = json.loads(dc("plan", "layer", "--json", *line).stdout)
    model, rank = told["model"], told["rank"]
    other = {"bert-base": 25051964, "bert-large": 33916732}.get(model["name"], 0)
    layer = 4 * model["hidden"] ** 2 + 2 * model["hidden"] * model["intermediate"] + 9 * model["hidden"] \
        + model["intermediate"]
    assert model["parameters"] == model["layers"] * layer + other
    seen = {(row["seq"], *flags_of(row).values()) for row in told["rows"]}
    assert len(seen) == len(told["rows"]) == 16
    for row in told["rows"]:
        config = LayerConfig(model["hidden"], model["heads"], model["intermediate"], dtype=dtype,
                             num_hidden_layers=model["layers"], **flags_of(row))
        for inventory in ("libdc", "deepspeed"):
            one = plan(config, row["seq"], 1, 1, other_parameters=other, inventory=inventory, **more)
            assert row["kept_bytes"][inventory] == one.kept_bytes
            assert (rank["weight_bytes"], rank["grad_bytes"], rank["optimizer_bytes"],
                    rank["working_bytes"]) == one[2:6]
            for gib, most in row["largest"].items():
                found = plan(config, row["seq"], int(gib) << 30, other_parameters=other, inventory=inventory, **more)
                assert most[inventory] == found.micro_batch


def test_the_tutorials_table(dc: Run) -> None:
    """Six of its seven rows are what DeepSpeed's formula gives with one size of the rest; the first is not."""
    tutorial = json.loads(dc("plan", "layer", "--json").stdout)["tutorial"]
    rows = [(row["seq"], "".join("1" if on else "0" for on in flags_of(row).values()), row["ran"], row["agrees"])
            for row in tutorial["rows"]]
    assert rows == [(128, "000", 80, False), (128, "100", 112, True), (128, "110", 128, True), (128, "111", 0, True),
                    (512, "000", 12, True), (512, "010", 16, True), (512, "111", 0, True)]
    assert tutorial["counted_bytes"] + tutorial["rest_bytes"] == 32 << 30
    for row in tutorial["rows"]:
        config = LayerConfig(1024, 16, dtype="float16", num_hidden_layers=24, **flags_of(row))
        for inventory, most in row["largest"].items():
            assert most == plan(config, row["seq"], 32 << 30, other_bytes=tutorial["rest_bytes"],
                                other_parameters=33916732, inventory=inventory).micro_batch
        assert row["largest"]["libdc"] > row["largest"]["deepspeed"] >= row["tried"]


def test_texts(dc: Run) -> None:
    text = dc("plan", "layer").stdout
    told = json.loads(dc("plan", "layer", "--json").stdout)
    assert len(max(text.splitlines(), key=len)) <= 120
    assert "336.2 million" in text and "S = 128, no flag: the next batch that was tried, 86" in text
    numbers = [[int(n) for n in re.findall(r"\d+", line.split("  ", 2)[-1]) if "." not in n][-4:]
               for line in text.splitlines() if re.match(r" +(128|512) [-ia g].*\.\d", line)]
    assert numbers == [[most[kind] for most in row["largest"].values() for kind in ("libdc", "deepspeed")]
                       for row in told["rows"]]
    alone = dc("plan", "layer", "--layers", "2", "--memory", "80").stdout
    assert alone.startswith("layers: 2 layers") and "tutorial" not in alone
