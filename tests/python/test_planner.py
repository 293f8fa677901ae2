"""libdc.plan: models, machines, a step's memory, bytes and time, the search, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
from libdc import plan as planner

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "rms_norm_eps": 1e-05}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
        "n_inner": None}
BERT = {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
        "num_hidden_layers": 12, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
LAYERS = {"tokens": 16, "layers": [{"shapes": [[256, 64], [256]], "flops": 1 << 20, "kept_bytes": 8192,
                                    "input_bytes": 2048, "workspace_bytes": 4096, "repeat": 6}]}


def write(folder: Path, table: Dict[str, Any]) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(table))
    return str(path)


def model_of(folder: Path, table: Dict[str, Any]) -> planner.Model:
    return planner.read(write(folder, table), 128, 2)


@pytest.mark.parametrize("table, parameters", [(LLAMA, 8030261248), (GPT2, 124439808), (BERT, 109514298)],
                         ids=["llama-3-8b", "gpt2", "bert-base"])
def test_parameters_are_the_published_models(tmp_path: Path, table: Dict[str, Any], parameters: int) -> None:
    assert model_of(tmp_path, table).parameters == parameters


@pytest.mark.parametrize("stage", range(4))
def test_bytes_are_those_of_the_closed_form(tmp_path: Path, stage: int) -> None:
    """Sizes that 8 divides, two nodes of 4: a gather brings 7 of 8 parts, 3 of them from the node."""
    model, machine = model_of(tmp_path, LAYERS), planner.load("h100")._replace(ranks_per_node=4)
    plan = planner.run(model, machine, planner.Options(ranks=8, stage=stage, accumulate=2))
    whole = 2 * model.parameters // 8 * 7
    float_parts = 4 * model.parameters // 8 * 7  # stage 0 gathers means, which are float32
    assert plan.gather_wire_bytes == (0, whole, whole, 4 * whole)[stage]
    assert plan.reduce_wire_bytes == 2 * whole + (2 * float_parts if stage == 0 else 0)
    assert plan.node_bytes * 4 == plan.network_bytes * 3
    assert plan.node_bytes + plan.network_bytes == plan.gather_wire_bytes + plan.reduce_wire_bytes


def test_memory_has_every_holder(tmp_path: Path) -> None:
    model, machine = model_of(tmp_path, LAYERS), planner.load("h100")
    plan = planner.run(model, machine, planner.Options(ranks=4, stage=3, micro_batch=3, bucket=1 << 14))
    own = model.parameters // 4
    first, peak = plan.points[0].bytes, plan.peak.bytes
    assert (first["weights"], first["gradients"]) == (2 * own, 4 * own)
    assert first["optimizer"] >= 12 * own  # a float32 copy and two moments
    assert [point.bytes["activations"] for point in plan.points[:6]] == [3 * 8192 * (i + 1) for i in range(6)]
    assert peak["layer gradients"] == 2 * model.layers[0].parameters and "backward" in plan.peak.moment
    assert plan.points[-1].bytes["activations"] == 0 and plan.points[-1].moment == "update"
    assert all(count >= 0 for point in plan.points for count in point.bytes.values())
    inputs = planner.run(model, machine, planner.Options(ranks=4, micro_batch=3, recompute=True))
    assert inputs.points[5].bytes["activations"] == 3 * 2048 * 6


def test_replicas_keep_gathers_inside(tmp_path: Path) -> None:
    """2 nodes of 4 ranks, a replica each: gathers stay in the node, and the state is that of 4 ranks."""
    model, machine = model_of(tmp_path, LAYERS), planner.load("h100")._replace(ranks_per_node=4)
    plan = planner.run(model, machine, planner.Options(ranks=8, replicas=2))
    whole = 2 * model.parameters
    assert plan.gather_wire_bytes == 2 * whole // 4 * 3
    assert plan.reduce_wire_bytes == whole // 8 * 7 + 2 * whole // 8  # each sums a piece, and gets the other
    assert plan.points[0].bytes["weights"] == whole // 4
    assert plan.network_bytes == whole // 8 * 4 + 2 * whole // 8
    with pytest.raises(ValueError, match="replicas = 3, must divide ranks = 8"):
        planner.Options(ranks=8, replicas=3)


def test_a_tied_weight_is_gathered_and_reduced_for_each_use(tmp_path: Path) -> None:
    tied = {"layers": [{"shapes": [[256, 64]]}, {"shapes": [[64]]}, {"shapes": [[64]], "uses": [[0, 0]]}]}
    model, machine = model_of(tmp_path, tied), planner.load("h100")
    plan = planner.run(model, machine, planner.Options(ranks=8, prefetch=0))
    whole, norms = 2 * 256 * 64 // 8 * 7, 2 * 2 * 64 // 8 * 7
    assert plan.gather_wire_bytes == 4 * whole + 2 * norms  # in the forward and in the backward, for two layers
    assert plan.reduce_wire_bytes == 2 * whole + norms
    assert plan.points[0].bytes["weights"] == 2 * (256 * 64 + 128) // 8


def test_offload_moves_activations_to_the_host(tmp_path: Path) -> None:
    model, machine = model_of(tmp_path, LAYERS), planner.load("h100")
    kept, moved = (planner.run(model, machine, planner.Options(ranks=4, micro_batch=3, accumulate=2, offload=offload))
                   for offload in (False, True))
    assert kept.host_bytes == 0 and moved.host_bytes == 3 * 8192 * 6
    assert max(point.bytes["activations"] for point in moved.points) == 2 * 3 * 8192  # a layer's, and the next one's
    assert [point.bytes["activations"] for point in moved.points[5:6]] == [3 * 8192]
    assert moved.gather_wire_bytes == kept.gather_wire_bytes


def test_the_largest_micro_batch_fits_and_the_next_does_not(tmp_path: Path) -> None:
    model = model_of(tmp_path, LAYERS)
    machine = planner.load("h100")._replace(memory_bytes=40 << 20)
    most = planner.largest_micro_batch(planner.run(model, machine, planner.Options(ranks=4, bucket=1 << 14)))
    fits = [planner.run(model, machine, planner.Options(ranks=4, bucket=1 << 14, micro_batch=batch)).fits
            for batch in (most, most + 1)]
    assert most > 1 and fits == [True, False]


def test_time_is_work_and_what_it_does_not_hide(tmp_path: Path) -> None:
    model, machine = model_of(tmp_path, LAYERS), planner.load("h100")
    alone = planner.run(model, machine, planner.Options(ranks=1, micro_batch=1024))
    assert alone.communication_ns == 0 and alone.step_ns >= alone.compute_ns
    work = 3 * 1024 * model.flops / machine.rate("bfloat16") * 1e9
    assert work <= alone.compute_ns <= 1.01 * work + 1e6
    slow = machine._replace(ranks_per_node=1, network_bytes_per_second=10**7)
    plan = planner.run(model, slow, planner.Options(ranks=4))
    assert plan.exposed_ns > 0.9 * plan.communication_ns  # almost no work hides it
    assert 0 < plan.flop_utilisation < alone.flop_utilisation < 0.51


@pytest.mark.parametrize("name", planner.names())
def test_each_machine_has_its_sources(name: str) -> None:
    machine = planner.load(name)
    assert machine.peak("bfloat16") > 10**12 and machine.memory_bytes > 10**10


def test_the_search_finds_the_fastest_that_fits(tmp_path: Path) -> None:
    model, machine = model_of(tmp_path, LAYERS), planner.load("h100")
    found = planner.search(model, machine, planner.Options(ranks=4, micro_batch=8))
    assert len(found) == 5 and all(each.plan.fits for each in found)
    assert [each.ns_per_token for each in found] == sorted(each.ns_per_token for each in found)
    assert "% of the step waits for communication" in found[0].why and planner.advise(found[0].plan)
    assert planner.search(model, machine._replace(memory_bytes=1000), planner.Options(ranks=4)) == []


@pytest.mark.parametrize("change, text", [
    ({"layers": []}, "layers = \\[\\], must be an array of objects"),
    ({"layers": [{"shapes": 3}]}, "shapes = 3, must be an array"),
    ({"layers": [{"shapes": [[4]], "flops": 1.5}]}, "flops = 1.5, must be an integer"),
    ({"layers": [{"shapes": [[4]], "backward": [1]}]}, "backward = \\[1\\]"),
    ({"layers": [{"shapes": [[4]], "uses": [0]}]}, "uses = \\[0\\], must be an array of pairs"),
    ({"layers": [{"shapes": [[4]], "uses": [[0, 1]]}]}, "uses = \\[0, 1\\], must be a layer's number"),
])
def test_bad_models_are_named(tmp_path: Path, change: Dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        model_of(tmp_path, {**LAYERS, **change})


def test_other_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type = 'mamba', must be one of llama"):
        model_of(tmp_path, {"model_type": "mamba"})
    with pytest.raises(ValueError, match="has no 'hidden_size'"):
        model_of(tmp_path, {"model_type": "llama"})
    with pytest.raises(ValueError, match="machine = 'b9000', must be a file or one of a100"):
        planner.load("b9000")
    with pytest.raises(ValueError, match="ranks = 257, must be 1 to 256"):
        planner.Options(ranks=257)
    table = json.loads((Path(planner.__file__).parent / "machines" / "h100.json").read_text())
    del table["sources"]["flops"]
    with pytest.raises(ValueError, match="sources has no 'flops'"):
        planner.load(write(tmp_path, table))


def command(*arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([sys.executable, "-m", "libdc", "plan", *arguments], text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_command(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    options: List[str] = ["--ranks", "64", "--tokens", "8192", "--recompute", "--price", "2"]
    text, told = command(path, *options).stdout, json.loads(command(path, *options, "--json").stdout)
    assert "8,030,261,248 parameters" in text and max(map(len, text.splitlines())) <= 120
    assert f"{told['exact']['gather_wire_bytes']:,} bytes" in text
    assert told["memory"]["peak_moment"] in text and told["time"]["cost_per_million_tokens"] > 0
    assert len(told["memory"]["points"]) == 2 * 34 + 1
    assert "forward of layers.31" in command(path, *options, "--timeline").stdout
    assert command(path, "--ranks", "1", code=1).stdout.count("does not fit") == 1
    best = command(write(tmp_path, LAYERS), "--search", "--micro-batch", "2").stdout
    assert best.count("tokens a second") == 5 and "To change first: " in best
    assert "cannot be read" in command(str(tmp_path / "none.json"), code=2).stderr
    assert "layer: the largest micro-batch" in command("layer", "--help").stdout
