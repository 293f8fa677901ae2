"""DeepSpeed's own DeepCompile passes on libdc, two ranks: losses, what stands in the graphs, the switch, refusals.
`make test-deepspeed` runs every stage, backend, model and communicator, and both forms of the surface."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List

from launch import HERE, NEWEST, SEED, environment, largest_difference, operators, run

SMALL = {"width": 64, "layers": 2}
ROUNDING = 4e-6  # of float32, in a loss of about 6


def python(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=600, env=environment(NEWEST, **variables))


def test_stage_3_with_a_graph_break(tmp_path: Path) -> None:
    """All passes: prefetch and selective gather come at step 5; at step 6 stale weights would show."""
    eager = run(NEWEST, tmp_path / "eager.json", stage=3, steps=9, **SMALL)
    ours = run(NEWEST, tmp_path / "ours.json", stage=3, backend="eager", steps=9, broken=True, communicator="libdc",
               **SMALL)
    assert largest_difference(eager, ours) < ROUNDING
    assert operators(ours, "reduce_grad") == [0, 0, 15, 14, 0, 0, 15, 14]
    assert operators(ours, "end_backward") == [0, 0, 1, 1, 0, 0, 1, 1]
    assert operators(ours, "allgather_param") == operators(ours, "wait_allgather") == operators(ours, "release_param")
    prefetches = operators(ours, "prefetch_params_fused")
    assert prefetches[:4] == [0, 0, 0, 0] and all(prefetches[4:])
    for rank in ours["ranks"]:
        gathers: List[int] = [b - a for a, b in zip(rank["gathers"], rank["gathers"][1:])]
        assert rank["persistent"] == 29  # all: memory is plenty
        assert gathers[:4] == [48] * 4  # 29 in forward, 19 in backward
        assert gathers[5:] == [29] * 3  # once a step


def test_stage_1_with_deepspeeds_layers_accumulating_over_gloo(tmp_path: Path) -> None:
    """A BERT of DeepSpeedTransformerLayers by DeepCompile, beside a plain one by DeepSpeed's eager ZeRO."""
    options: Any = {"model": "bert", "gelu": "tanh", "stage": 1, "steps": 3, "accumulate": 2, **SMALL}
    plain = run(NEWEST, tmp_path / "plain.json", **options)
    ours = run(NEWEST, tmp_path / "ours.json", kernel=True, backend="eager", communicator="torch", **options)
    assert largest_difference(plain, ours) < ROUNDING
    assert operators(ours, "reduce_grad") == [0, 32]


def test_the_seeds_form(tmp_path: Path) -> None:
    """The oldest version, whose operators have the form of the seed's."""
    options: Any = {"stage": 2, "steps": 3, **SMALL}
    eager = run(SEED, tmp_path / "eager.json", **options)
    ours = run(SEED, tmp_path / "ours.json", backend="eager", communicator="libdc", **options)
    assert largest_difference(eager, ours) == 0.0
    assert operators(ours, "reduce_grad") == [0, 29] and operators(ours, "end_backward") == [0, 1]


def two_ranks(version: str, script: str, *arguments: str) -> str:
    """The output of a script in which DeepSpeed runs on libdc."""
    done = subprocess.run([sys.executable, "-m", "libdc.run", "-n", "2", "-m", "libdc.torch.deepspeed",
                           str(HERE / script), *arguments], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=600, env=environment(version))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gradients_that_deepspeeds_passes_lose() -> None:
    """One engine after another: DeepSpeed keeps the hooks of each, which bind its gradient buffers."""
    assert two_ranks(NEWEST, "gradients.py", "1:eager", "2:inductor", "3:eager").count(" ok\n") == 3


def test_gathered_weights_are_whole() -> None:
    """DeepSpeed before 0.19.8 waits for the last gather of a list alone."""
    two_ranks(SEED, "gather.py")


def test_programs_without_a_line_for_libdc(tmp_path: Path) -> None:
    code = """import deepspeed, libdc.torch.deepspeed as switch
from deepspeed.ops.op_builder.dc import DeepCompileBuilder
from deepspeed.accelerator import get_accelerator
module = DeepCompileBuilder().load().__name__ if switch.is_enabled() else ""
print(switch.is_enabled(), module, get_accelerator()._name)"""
    on_libdc, off = "True libdc.torch.deepspeed.handle cpu", "False  cpu"
    (tmp_path / "program.py").write_text(code + "\nimport sys; print(switch.handle.communicator, *sys.argv[1:])")
    for program in ([str(tmp_path / "program.py")], ["-m", "program"]):
        done = subprocess.run([sys.executable, "-m", "libdc.torch.deepspeed", *program, "--flag"], text=True,
                              capture_output=True, stdin=subprocess.DEVNULL, timeout=600, cwd=tmp_path,
                              env=environment(NEWEST, LIBDC_DEEPSPEED="torch"))
        assert done.stdout.splitlines()[-2:] == [on_libdc, "torch --flag"], done.stdout + done.stderr
    hook = environment(NEWEST)["PYTHONPATH"]
    done = python(code, PYTHONPATH=os.pathsep.join([str(HERE / "every"), hook]))
    assert done.stdout.splitlines()[-1:] == [on_libdc], done.stdout + done.stderr
    done = python(code, LIBDC_DEEPSPEED="torch")  # the variable alone does nothing
    assert done.stdout.splitlines()[-1:] == [off], done.stdout + done.stderr


def test_transformer_layer() -> None:
    """By every name that DeepSpeed has for it, as its users call it."""
    done = python("""import libdc.torch.deepspeed, deepspeed, torch
libdc.torch.deepspeed.enable()
from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
assert DeepSpeedTransformerLayer is deepspeed.DeepSpeedTransformerLayer is deepspeed.ops.DeepSpeedTransformerLayer
config = DeepSpeedTransformerConfig(batch_size=2, hidden_size=32, intermediate_size=128, heads=4, num_hidden_layers=2,
                                    attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0, initializer_range=0.02, seed=1)
layers = torch.nn.ModuleList(DeepSpeedTransformerLayer(config) for _ in range(2))
x = torch.randn(2, 16, 32, requires_grad=True)
y = x
for layer in layers:
    y = layer(y, torch.zeros(2, 1, 1, 16))
y.square().mean().backward()
reached = all(p.grad is not None for p in layers.parameters())
print(type(layers[1]).__module__, bool(x.grad.abs().sum() > 0), reached)""")
    expected = "libdc.torch.transformer.deepspeed_layer True True"
    assert done.stdout.splitlines()[-1:] == [expected], done.stdout + done.stderr


def test_refusals() -> None:
    done = python("""import deepspeed
import deepspeed.compile.util as util
import libdc.torch.deepspeed as switch

def refused(*arguments):
    try:
        switch.enable(*arguments)
    except (RuntimeError, ValueError) as error:
        print(error)

refused("smoke")
version, deepspeed.__version__ = deepspeed.__version__, "0.20.1"
refused()
deepspeed.__version__, util.dc_handle = version, object()
refused()
print(switch.is_enabled())""")
    texts = ["communicator = 'smoke', must be one of 'auto', 'libdc', 'torch'",
             "DeepSpeed is version 0.20.1; 0.18.9 to 0.19.8 are tested", "own dc library is loaded already", "False"]
    lines = done.stdout.splitlines()[-len(texts) :]
    assert len(lines) == len(texts) and all(map(str.__contains__, lines, texts)), done.stdout + done.stderr
    done = python("import torch\nkeep = torch.library.Library('dc', 'DEF')\nimport libdc.torch.deepspeed")
    assert done.returncode == 1 and "operator namespace 'dc' is taken" in done.stderr, done.stderr
