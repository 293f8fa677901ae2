"""libdc.plan: models, machines, a step's memory, bytes and time, the search, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
from libdc import plan as planner
from libdc.plan.checks import run_command

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
    return planner.read(write(folder, table), None if "layers" in table else 128, 2)


def test_biases_and_heads_of_their_own_count(tmp_path: Path) -> None:
    def parameters(table: Dict[str, Any], **more: Any) -> int:
        return model_of(tmp_path, {**table, **more}).parameters

    blocks, width, keys, wide = 32, 4096, 1024, 14336
    assert parameters(LLAMA, attention_bias=True) - parameters(LLAMA) == blocks * (2 * width + 2 * keys)
    assert parameters(LLAMA, mlp_bias=True) - parameters(LLAMA) == blocks * (2 * wide + width)
    assert parameters(GPT2, tie_word_embeddings=False) - parameters(GPT2) == 50257 * 768
    assert parameters(BERT, tie_word_embeddings=False) - parameters(BERT) == 30522 * 768
    for table in (GPT2, BERT):
        with pytest.raises(ValueError, match="add_cross_attention = True, must be false"):
            parameters(table, add_cross_attention=True)
    path = write(tmp_path, BERT)
    assert planner.read(path, None, 2).tokens == 512
    with pytest.raises(ValueError, match="tokens = 513, must be at most 512, the positions of model"):
        planner.read(path, 513, 2)


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


def test_two_levels_bring_each_byte_to_a_node_once() -> None:
    """8 ranks on two nodes without a heap, as over TCP and MPI: a gather's column is over the network and its block in
    the node. A reduction of 16 bits sends float32 sums."""
    model, machine = planner.from_layers({"layers": [{"shapes": [[1024, 1024]]}]}, "wide"), planner.load("h100")
    options = planner.Options(ranks=8, stage=1, dtype="float32", grad_dtype="float32", heap=False)
    plan = planner.run(model, machine._replace(ranks_per_node=4), options)
    part = 4 * 2**20 // 8
    assert plan.network_bytes == 2 * part and plan.node_bytes == 2 * 6 * part
    assert plan.gather_wire_bytes == plan.reduce_wire_bytes == 7 * part  # of the context: all that is not its own
    narrow = planner.run(model, machine._replace(ranks_per_node=4), planner.Options(ranks=8, stage=1, heap=False))
    assert narrow.network_bytes == part // 2 + part and narrow.node_bytes == 6 * part
    pairs = planner.run(model, machine._replace(ranks_per_node=2), options)
    assert pairs.network_bytes == 2 * 3 * part and pairs.node_bytes == 2 * 4 * part
    small = planner.from_layers({"layers": [{"shapes": [[64, 64]]}]}, "small")  # directly
    plan = planner.run(small, machine._replace(ranks_per_node=4), options)
    assert plan.network_bytes * 3 == plan.node_bytes * 4


def test_layers_that_keep_their_inputs_are_not_computed_again(tmp_path: Path) -> None:
    """Embeddings and the head: their work and gathers are those without recomputation."""
    model, machine = model_of(tmp_path, {**GPT2, "tie_word_embeddings": False}), planner.load("h100")
    plain, again = (planner.run(model, machine, planner.Options(ranks=8, recompute=recompute, optimizer=False))
                    for recompute in (False, True))
    again_flops = sum(layer.flops for layer in model.layers if layer.input_bytes < layer.kept_bytes)
    assert 0 < again_flops < model.flops
    assert (again.compute_ns - plain.compute_ns) / plain.compute_ns == pytest.approx(again_flops / model.flops / 3,
                                                                                     rel=0.01)
    gathered = sum((1 + (i > 0)) * layer.parameters for i, layer in enumerate(model.layers))  # embeddings once
    assert model.layers[0].backward == () and again.gather_wire_bytes == 2 * gathered // 8 * 7


def test_no_core_waits_for_the_network(tmp_path: Path) -> None:
    """8 ranks, at a slow link. On two nodes of 2 cores a step takes as long as with a core for each rank; on one node
    the cores move what the ranks exchange, each for four."""
    model, slow = model_of(tmp_path, LAYERS), planner.load("h100")._replace(network_bytes_per_second=10**6)
    alone = slow._replace(ranks_per_node=8, node_bytes_per_second=10**6)
    for machine, most in ((slow._replace(ranks_per_node=4), 1), (alone, 4)):
        shared, own = (planner.run(model, machine._replace(cores=cores), planner.Options(ranks=8)).step_ns
                       for cores in (2, 8))
        assert shared == pytest.approx(most * own, rel=0.01)


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


def best(kept_bytes: int, ranks: int, network: int, host: int = 1 << 38) -> planner.Options:
    """The first choice for much work with few tokens, and a GiB of memory."""
    layer = {"shapes": [[4096, 4096]], "flops": 1 << 42, "kept_bytes": kept_bytes, "input_bytes": kept_bytes // 2,
             "repeat": 8}
    machine = planner.load("h100")._replace(memory_bytes=1 << 30, network_bytes_per_second=network,
                                            host_memory_bytes=host)
    model = planner.from_layers({"tokens": 512, "layers": [layer]}, "wide")
    return planner.search(model, machine, planner.Options(ranks=ranks, micro_batch=2))[0].plan.options


def test_the_search_shards_among_all_on_one_node() -> None:
    options = best(1 << 20, 8, 50 * 10**9)
    assert (options.replicas, options.offload, options.recompute) == (1, False, False)


def test_the_search_takes_a_replica_a_node_where_the_network_is_slow() -> None:
    options = best(1 << 20, 32, 2 * 10**9)
    assert (options.replicas, options.offload, options.recompute) == (4, False, False)


def test_the_search_offloads_what_does_not_fit() -> None:
    options = best(300 << 20, 8, 50 * 10**9)
    assert (options.replicas, options.offload, options.recompute) == (1, True, False)
    for host in (0, 1 << 20):  # it is not known, or too small
        options = best(100 << 20, 8, 50 * 10**9, host)
        assert (options.offload, options.recompute) == (False, True)


def test_host_memory_has_a_limit() -> None:
    layer = {"shapes": [[64, 64]], "kept_bytes": 1 << 20, "repeat": 4}
    machine = planner.load("h100")._replace(host_memory_bytes=10 << 20)
    model = planner.from_layers({"layers": [layer]}, "kept")
    plans = [planner.run(model, machine, planner.Options(offload=True, micro_batch=n)) for n in (2, 3)]
    assert [plan.fits for plan in plans] == [True, False]
    assert [planner.largest_micro_batch(plan) for plan in plans] == [2, 2]


@pytest.mark.parametrize("change, text", [
    ({"layers": []}, "layers = \\[\\], must be an array of objects"),
    ({"tokens": 0}, "tokens = 0, must be 1 to 4294967296"),
    ({"tokns": 4}, "model has 'tokns', must have layers, name, tokens alone"),
    ({"name": 3}, "name = '3', must be a string of at most 200"),
    ({"name": "\x1b[2J"}, r"name = '.x1b\[2J', must be a string of at most 200 characters, all printable"),
    ({"name": "\ud800"}, "must be a string of at most 200 characters, all printable"),
])
def test_bad_models_are_named(tmp_path: Path, change: Dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        model_of(tmp_path, {**LAYERS, **change})


@pytest.mark.parametrize("change, text", [
    ({"shapes": 3}, "shapes = 3, must be an array"),
    ({"shapes": [[-1]]}, "a length of shapes = -1, must be 1 to"),
    ({"shapes": [[True]]}, "a length of shapes = True, must be an integer"),
    ({"shapes": [[1] * 65]}, "the number of a shape's lengths = 65, must be 0 to 64"),
    ({"name": "a\nb"}, "name = 'a.nb', must be a string of at most 200 characters, all printable"),
    ({"flops": 1.5}, "flops = 1.5, must be an integer"),
    ({"flops": float("nan")}, "flops = nan, must be an integer"),
    ({"kept_bytes": None}, "kept_bytes = None, must be an integer"),
    ({"kept_bytes": 8, "input_bytes": 9}, "input_bytes .a part of kept_bytes. = 9, must be 0 to 8"),
    ({"repeat": 0}, "repeat = 0, must be 1 to 65536"),
    ({"backward": [1]}, "backward = 1, must be 0 to 0"),
    ({"backward": [0, 0]}, "backward = .0, 0., must be an array of numbers of shapes, each once"),
    ({"backward": [[0]]}, "backward = .0., must be an integer"),
    ({"uses": [0]}, "uses = \\[0\\], must be an array of pairs"),
    ({"uses": [[0, 1]]}, "uses = \\[0, 1\\], must be another layer's number"),
    ({"uses": [[0, 0]]}, "uses = \\[0, 0\\], must be another layer's number"),
    ({"kept_byte": 3}, "layers.0. has 'kept_byte', must have backward, flops"),
    ({"frozen": [1]}, "frozen = 1, must be 0 to 0"),
])
def test_bad_layers_are_named(tmp_path: Path, change: Dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        model_of(tmp_path, {"layers": [{"shapes": [[4]], **change}]})


@pytest.mark.parametrize("change, text", [
    ({"hidden_size": 0}, "hidden_size = 0, must be 1 to"),
    ({"hidden_size": "64"}, "hidden_size = '64', must be an integer"),
    ({"num_attention_heads": 5}, "num_attention_heads = 5, must divide hidden_size = 4096"),
    ({"num_attention_heads": 0}, "num_attention_heads = 0, must be 1 to"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers = 10000000, must be 1 to 65536"),
    ({"num_key_value_heads": 5}, "num_key_value_heads = 5, must divide num_attention_heads = 32"),
    ({"attention_bias": 1}, "attention_bias = 1, must be true or false"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no', must be true or false"),
    ({"model_type": ["llama"]}, "model_type = .'llama'., must be one of llama"),
])
def test_bad_configurations_are_named(tmp_path: Path, change: Dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        model_of(tmp_path, {**LLAMA, **change})


@pytest.mark.parametrize("change, text", [
    ({"flops": None}, "flops = None, must be an object"),
    ({"flops": {}}, "flops = {}, must be an object"),
    ({"flops": {"bfloat16": 0}}, "flops.bfloat16 = 0, must be 1000 to"),
    ({"sources": None}, "sources = None, must be an object"),
    ({"network_bytes_per_second": 0}, "network_bytes_per_second = 0, must be 1000 to"),
    ({"node_latency_ns": 1 << 62}, "node_latency_ns = 4611686018427387904, must be 0 to 1000000000000"),
    ({"product_percent": 101}, "product_percent = 101, must be 1 to 100"),
    ({"memory": 3}, "has 'memory', must have cores, flops"),
    ({"name": None}, "name = 'None', must be a string"),
])
def test_bad_machines_are_named(tmp_path: Path, change: Dict[str, Any], text: str) -> None:
    table = json.loads((Path(planner.__file__).parent / "machines" / "h100.json").read_text())
    with pytest.raises(ValueError, match=text):
        planner.load(write(tmp_path, {**table, **change}))


@pytest.mark.parametrize("layer, options, text", [
    ({"shapes": [[1 << 40, 1 << 40]]}, {}, "parameters = 1208925819614629174706176, must be 0 to"),
    ({"shapes": [[4]], "kept_bytes": 1 << 50}, {"micro_batch": 1 << 20}, "micro_batch = 1048576 = "),
    ({"shapes": [[4]], "flops": 1 << 60}, {"micro_batch": 1 << 20}, "a step takes up to .*, must be at most 1e9 s"),
    ({"shapes": [[4]], "repeat": 1000}, {"accumulate": 1024}, "layers, times accumulate = 1024 = 1024000, must be 1"),
])
def test_what_cannot_be_counted_is_named(layer: Dict[str, Any], options: Dict[str, int], text: str) -> None:
    model = planner.from_layers({"layers": [layer]}, "huge")
    with pytest.raises(ValueError, match=text):
        planner.run(model, planner.load("h100"), planner.Options(ranks=8, **options))


def test_other_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type = 'mamba', must be one of llama"):
        model_of(tmp_path, {"model_type": "mamba"})
    with pytest.raises(ValueError, match="has no 'hidden_size'"):
        model_of(tmp_path, {"model_type": "llama"})
    with pytest.raises(ValueError, match="machine = 'b9000', must be a file or one of a100"):
        planner.load("b9000")
    for wrong, text in (({"ranks": 1025}, "ranks = 1025, must be 1 to 1024"),
                        ({"ranks": -1}, "ranks = -1, must be 1 to"),
                        ({"accumulate": 1025}, "accumulate = 1025, must be 1 to 1024"),
                        ({"stage": 0, "offload": True}, "offload = True, must be False in stage 0")):
        with pytest.raises(ValueError, match=text):
            planner.Options(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens = 8, must not be given for layers"):
        planner.read(write(tmp_path, LAYERS), 8, 2)
    for text, error in (("[" * 100000, "is not JSON"), ("[]", "holds no JSON object"), ("{", "is not JSON")):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(ValueError, match=error):
            planner.read(str(tmp_path / "model.json"), None, 2)
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


@pytest.mark.parametrize("line, text", [
    (["--price", "nan"], "price = nan, must be 0 to"),
    (["--search", "--stage", "1"], "stage = 1 is of one plan: without --search"),
    (["--search", "--timeline"], "timeline = True is of one plan"),
    (["--tokens", "0"], "tokens = 0, must be 1 to"),
    (["--ranks", "-8"], "ranks = -8, must be 1 to 1024"),
    (["--machine", "m" * 300], "mmm', must be a file or one of a100, "),
])
def test_bad_lines_are_named(tmp_path: Path, line: List[str], text: str) -> None:
    done = command(write(tmp_path, LLAMA), *line, code=2)
    assert done.stderr.startswith("libdc plan: ") and text in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
@pytest.mark.parametrize("name", ["plan", "sim"])
def test_an_output_that_takes_nothing_is_an_error(tmp_path: Path, name: str, where: str) -> None:
    line = f'"{sys.executable}" -m libdc {name} {write(tmp_path, LAYERS)} {where}'
    done = subprocess.run(line, shell=True, text=True, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=600)
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"libdc {name}: stdout cannot be written: ")


def test_the_error_of_a_file_is_not_the_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> int:
        print("half of it")
        return len(Path("/no/such/file").read_text())

    assert run_command("libdc plan", body) == 2
    assert capsys.readouterr() == ("", "libdc plan: [Errno 2] No such file or directory: '/no/such/file'\n")
