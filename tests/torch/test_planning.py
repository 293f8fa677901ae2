"""libdc.torch.plan: its bytes are those of the trainer of examples/gpt, and its layers those of the model."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import libdc.plan
import libdc.run
import libdc.torch
import pytest
import torch
from libdc.torch.sharding.model import roots_of

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "gpt")


def bytes_of_a_step(comm: libdc.Comm, model: torch.nn.Module, stage: int, replicas: int) -> List[int]:
    """A rank that trains."""
    mesh = (replicas, comm.size // replicas) if replicas > 1 else None
    model = libdc.torch.shard(copy.deepcopy(model), stage, comm=comm, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        libdc.torch.stats(model, reset=True)
        model(*tokens_of(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = libdc.torch.stats(model)
    return [stats.gather_wire_bytes, stats.reduce_wire_bytes]


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    monkeypatch.syspath_prepend(GPT)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    from model import CONFIGS
    from model import GPT as Model

    return Model(CONFIGS["tiny"])


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("launcher", [[sys.executable, "-m", "libdc.run"], ["mpirun.mpich"]], ids=["run", "mpich"])
def test_memory_and_bytes_are_those_of_processes(launcher: List[str]) -> None:
    """All statistics of a trainer, also over MPI. tests/transformers has threads, bench/plan/exact.py all cases."""
    script = [str(ROOT / "bench" / "plan" / "exact.py"), "--models", "gpt", "--stages", "3", "--transports"]
    program = [*script, "processes"] if launcher[1:] == ["-m", "libdc.run"] else [sys.executable, *script, "mpi"]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run([*launcher, "-n", "2", *program], text=True, capture_output=True, timeout=600,
                          stdin=subprocess.DEVNULL, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs, the largest difference is 0 bytes" in done.stdout


def tokens_of(model: torch.nn.Module, samples: int = 2) -> List[torch.Tensor]:
    tokens = torch.zeros(samples, model.config.seq, dtype=torch.int64)
    return [tokens, tokens]


@pytest.mark.parametrize("ranks, replicas", [(3, 1), (4, 2)])  # no power of two, so that parts differ; and hybrid
def test_wire_bytes_are_the_trainers(gpt: torch.nn.Module, ranks: int, replicas: int) -> None:
    for stage in range(4):
        measured = libdc.run.threads(ranks, bytes_of_a_step, gpt, stage, replicas)[0]
        plan = libdc.torch.plan(gpt, tokens_of(gpt), ranks=ranks, stage=stage, replicas=replicas, dtype="float32")
        assert [plan.gather_wire_bytes, plan.reduce_wire_bytes] == measured, stage
        assert plan.node_bytes == sum(measured) and plan.network_bytes == 0


def test_layers_have_the_models_parameters_work_and_activations(gpt: torch.nn.Module) -> None:
    model = libdc.torch.planning.model_of(gpt, tokens_of(gpt))
    assert [layer.name for layer in model.layers] == ["tokens", "positions", "blocks.0", "blocks.1", "norm", "head"]
    assert model.parameters == sum(parameter.numel() for parameter in gpt.parameters())
    tokens, hidden = 64, 64
    matrices = 2 * tokens * 12 * hidden * hidden
    assert model.layers[2].flops == matrices + 4 * tokens * tokens * hidden
    assert model.layers[5].flops == 2 * tokens * hidden * 256
    assert model.layers[2].input_bytes == tokens * hidden * 4 < model.layers[2].kept_bytes
    assert model.layers[0].backward == () and model.tokens == tokens
    weights = [gpt.get_parameter(f"blocks.0.{name}.weight").shape for name in ("qkv", "proj", "up", "down")]
    read = [model.layers[2].shapes[i] for i in model.layers[2].backward]
    assert set(map(tuple, weights)) <= set(read) and (3 * hidden,) not in read  # a linear layer's bias is not


def test_kept_bytes_are_those_that_autograd_keeps(gpt: torch.nn.Module) -> None:
    """The same forward with memory: distinct storages that are saved, without parameters."""
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in gpt.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    batch = tokens_of(gpt)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gpt(*batch)
    layers = libdc.torch.planning.model_of(gpt, batch).layers
    real = sum(storage.nbytes() for storage in kept.values()) / len(batch[0])
    assert abs(sum(layer.kept_bytes for layer in layers) - real) <= 0.02 * real  # kernels of the CPU pad a little


def test_a_tensors_truth_is_yes() -> None:
    """A forward may ask whether a mask hides anything, and there are no values."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if (x > -1).all() else x

    assert libdc.torch.planning.model_of(Masked(), [torch.zeros(2, 4)]).flops == 2 * 4 * 4


def test_the_model_and_its_grads_stay(gpt: torch.nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    libdc.torch.plan(gpt, {"x": tokens_of(gpt)[0], "targets": tokens_of(gpt)[1]}, machine="a100")
    assert all(torch.equal(tensor, before[name]) for name, tensor in gpt.state_dict().items())
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in gpt.parameters())
    with pytest.raises(ValueError, match="batch has no tensor of at least one sample"):
        libdc.torch.plan(gpt, [3])


def sharded_stage(comm: libdc.Comm, model: torch.nn.Module, batch: Any = None) -> int:
    model = libdc.torch.shard(copy.deepcopy(model), "auto", comm=comm, batch=batch)
    return int(roots_of(model)[0].group.stage)


def test_auto_takes_the_fastest_stage_that_fits(monkeypatch: pytest.MonkeyPatch,
                                                capsys: "pytest.CaptureFixture[str]") -> None:
    """Memory shrinks until stage 3 alone fits, and then none does."""
    model, batch = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12))), [torch.zeros(2, 512)]
    peaks = [libdc.torch.plan(model, batch, ranks=2, stage=stage, micro_batch=2, dtype="float32", bucket=1 << 20
                              ).peak.total for stage in (0, 1, 3)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
    taken = []
    for memory in (1 << 40, peaks[1], peaks[2], 1000):
        limited = libdc.plan.load("xeon8480")._replace(memory_bytes=memory, ranks_per_node=2)
        monkeypatch.setattr(libdc.torch.planning, "_machine_here", lambda *_, limited=limited: limited)
        taken.append(libdc.run.threads(2, sharded_stage, model, batch))
    assert taken == [[1, 1], [1, 1], [3, 3], [3, 3]]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and "takes stage 1 for 2 ranks" in lines[1] and "though it does not fit" in lines[3]
    assert libdc.run.threads(2, sharded_stage, model, batch[0]) == taken[3]  # a tensor is one argument
    assert capsys.readouterr().err.splitlines() == lines[3:]


def test_auto_without_a_batch_says_so(gpt: torch.nn.Module, capsys: "pytest.CaptureFixture[str]") -> None:
    taken = libdc.run.threads(2, sharded_stage, gpt)
    assert taken[0] == taken[1]
    assert "without activations" in capsys.readouterr().err


def test_auto_fails_on_every_rank(gpt: torch.nn.Module) -> None:
    failures = []

    def body(comm: libdc.Comm) -> None:
        try:
            sharded_stage(comm, gpt, [3])
        except Exception as error:
            failures.append(str(error))

    libdc.run.threads(2, body)
    assert sorted(failures)[0].startswith("plan: batch has no tensor")
    assert "rank 0 could not plan" in sorted(failures)[1]
    with pytest.raises(ValueError, match="batch is of stage = 'auto' alone"):
        libdc.torch.shard(gpt, 3, batch=[3])
    with pytest.raises(ValueError, match="must be 0, 1, 2, 3 or 'auto'"):
        libdc.torch.shard(gpt, "best")


@pytest.mark.parametrize("bucket", [None, 100, 1 << 26])
def test_buckets_are_those_of_shard(bucket: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512))

    def rank(comm: libdc.Comm) -> int:
        own = libdc.torch.shard(copy.deepcopy(model), 3, comm=comm, **({} if bucket is None else
                                                                       {"bucket_size": bucket}))
        for _ in range(2):
            own(torch.zeros(4, 512)).sum().backward()
        return int(libdc.torch.stats(own).bucket_bytes)

    options = {} if bucket is None else {"bucket": bucket}
    plan = libdc.torch.plan(model, [torch.zeros(4, 512)], ranks=2, stage=3, dtype="float32", **options)
    assert plan.peak.bytes["buckets"] == libdc.run.threads(2, rank)[0]


def test_attention_of_key_groups_keeps_no_pairs() -> None:
    class Attention(torch.nn.Module):
        def __init__(self, groups: bool) -> None:
            super().__init__()
            self.q, self.groups = torch.nn.Linear(64, 64), groups
            self.k, self.v = (torch.nn.Linear(64, 16 if groups else 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (each(x).unflatten(2, (-1, 16)).transpose(1, 2) for each in (self.q, self.k, self.v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups)

    kept = [sum(layer.kept_bytes for layer in libdc.torch.planning.model_of(
        Attention(groups), [torch.zeros(1, tokens, 64)]).layers) for groups in (True, False) for tokens in (256, 512)]
    assert kept[1] == 2 * kept[0] and kept[3] == 2 * kept[2]  # of tokens, not of pairs
    assert kept[3] - kept[1] == 2 * 48 * 512 * 4  # keys and values of three heads fewer


def test_frozen_parameters_have_no_gradients(gpt: torch.nn.Module) -> None:
    """Wire bytes are the trainer's, and memory and work are less."""
    for parameter in [*gpt.tokens.parameters(), *gpt.blocks.parameters()]:
        parameter.requires_grad_(False)
    gpt.blocks[1].ln1.bias.requires_grad_(True)
    trained = sum(parameter.numel() for parameter in gpt.parameters() if parameter.requires_grad)
    options: Any = dict(ranks=2, dtype="float32")
    for stage in range(4):
        measured = libdc.run.threads(2, bytes_of_a_step, gpt, stage, 1)[0]
        plan = libdc.torch.plan(gpt, tokens_of(gpt), stage=stage, **options)
        assert [plan.gather_wire_bytes, plan.reduce_wire_bytes] == measured, stage
    whole = copy.deepcopy(gpt).requires_grad_(True)
    for stage, ranks in ((0, 1), (3, 2)):
        first, all_of_it = (libdc.torch.plan(model, tokens_of(gpt), stage=stage, **options) for model in (gpt, whole))
        assert 4 * trained / ranks <= first.points[0].bytes["gradients"] < 4 * trained / ranks + 500
        assert first.points[0].bytes["optimizer"] < all_of_it.points[0].bytes["optimizer"] / 2
        assert first.compute_ns < all_of_it.compute_ns
        assert first.points[0].bytes["weights"] == all_of_it.points[0].bytes["weights"]
    gpt.head.weight = gpt.tokens.weight  # frozen
    tied = libdc.torch.planning.model_of(gpt, tokens_of(gpt))
    assert tied.trained_flops < libdc.torch.planning.model_of(whole, tokens_of(gpt)).trained_flops
    assert tied.backward_passes(len(tied.layers) - 1, tied.first_trained) == 1
    nothing = libdc.torch.plan(copy.deepcopy(gpt).requires_grad_(False), tokens_of(gpt), stage=3, **options)
    assert nothing.model.trained_flops == nothing.model.flops and nothing.model.first_trained == len(tied.layers)
    assert nothing.reduce_wire_bytes == 0 and nothing.points[0].bytes["gradients"] == 0


def test_types_are_the_models_or_the_given_one() -> None:
    model, batch = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh()), torch.zeros(4, 64)
    own, half = libdc.torch.plan(model, batch), libdc.torch.plan(model, [batch], dtype="bfloat16")
    given = libdc.torch.plan(copy.deepcopy(model).bfloat16(), {"input": batch.bfloat16()})
    assert own.options.dtype == "float32" and given.options.dtype == "bfloat16"
    assert half.points == given.points and half.step_ns == given.step_ns
    for name in ("weights", "activations", "layer gradients"):
        assert own.peak.bytes[name] == 2 * half.peak.bytes[name], name


def gradients_and_wire_bytes(comm: libdc.Comm, model: torch.nn.Module, stage: int, types: Any) -> List[int]:
    model = libdc.torch.shard(copy.deepcopy(model), stage, comm=comm, **types)
    model(torch.zeros(4, 64, dtype=types.get("param_dtype", model[0].weight.dtype))).sum().backward()
    stats, grads = libdc.torch.stats(model), [parameter.grad for parameter in model.parameters()]
    kept = sum((grad if stage == 0 else grad.to_local()).nbytes for grad in grads)
    return [kept, stats.gather_wire_bytes, stats.reduce_wire_bytes]


@pytest.mark.parametrize("own, types", [
    (torch.bfloat16, {}),
    (torch.float32, {"param_dtype": torch.bfloat16}),
    (torch.float32, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    (torch.bfloat16, {"reduce_dtype": torch.float32}),
], ids=["own", "param", "both", "reduce"])
def test_gradients_and_bytes_have_the_trainers_types(own: torch.dtype, types: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 61), torch.nn.Linear(61, 64)).to(own)
    names = {name: str(dtype).rpartition(".")[2] for name, dtype in types.items()}
    for stage in (0, 1, 3):
        measured = libdc.run.threads(3, gradients_and_wire_bytes, model, stage, types)[0]
        plan = libdc.torch.plan(model, torch.zeros(4, 64, dtype=own), ranks=3, stage=stage, **names)
        assert [plan.points[0].bytes["gradients"], plan.gather_wire_bytes, plan.reduce_wire_bytes] == measured, stage
    assert names == {} or all(f" {name}" in libdc.plan.as_text(plan) for name in names.values())


def test_auto_plans_the_types_the_ranks_and_the_bucket_of_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plan_of = [], libdc.torch.planning.run

    def note(model: Any, machine: Any, options: Any) -> Any:
        seen.append(options)
        return plan_of(model, machine, options)

    monkeypatch.setattr(libdc.torch.planning, "run", note)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    model[0].requires_grad_(False)
    options: Any = dict(bucket=1 << 20, prefetch=1, param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    for ranks, replicas in ((1024, 2), (768, 3)):  # 3 does not divide a smaller power of two
        seen.clear()
        libdc.torch.planning._stage_of(model, [torch.zeros(4, 64)], ranks, torch.device("cpu"),
                                       {**options, "replicas": replicas})
        assert [each.stage for each in seen] == [0, 1, 3] and {each.ranks for each in seen} == {ranks}
        assert {(each.dtype, each.grad_dtype, each.param_dtype, each.reduce_dtype) for each in seen} == {
            ("float32", "float32", "bfloat16", "float16")}
        assert {each.bucket for each in seen} == {64 * 8 + 8}  # of what is trained
    seen.clear()
    libdc.run.threads(1, lambda comm: libdc.torch.shard(model, "auto", comm=comm, param_dtype=torch.bfloat16))
    assert {each.param_dtype for each in seen} == {"bfloat16"}


@pytest.mark.parametrize("arguments, kind, text", [
    (dict(tokens=-1), ValueError, "tokens = -1, must be 0 to"),
    (dict(tokens=2.5), ValueError, "tokens = 2.5, must be an integer"),
    (dict(machine=None), TypeError, "machine is a NoneType"),
    (dict(batch=None), TypeError, "batch is a NoneType, must be a tensor, a list"),
    (dict(recompute="no"), ValueError, "recompute = 'no', must be True or False"),
    (dict(grad_dtype=None), ValueError, "grad_dtype = None, must be one of"),
    (dict(param_dtype="float64"), ValueError, "param_dtype = 'float64', must be one of"),
    (dict(optimizer="sgd"), ValueError, "optimizer = 'sgd', must be True or False"),
])
def test_bad_arguments_are_named(arguments: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        libdc.torch.plan(torch.nn.Linear(4, 4), **{"batch": torch.zeros(2, 4), **arguments})
