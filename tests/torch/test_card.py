"""The tests that scripts/gpu-check runs on a card, and `make test` in small on the CPU: the operators by PyTorch's own
checks, and the byte GPT at every stage. It runs on one rank and on two that are threads, in eager mode and compiled.
LIBDC_TEST_DEVICE names the device."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
from pathlib import Path
from typing import Any, Iterator, List

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in one order

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import libdc  # noqa: E402
import libdc.torch as dct  # noqa: E402
from libdc import optim  # noqa: E402
from libdc.run import threads  # noqa: E402
from libdc.torch import dc  # noqa: E402
from libdc.transformer import LayerConfig  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))
from model import CONFIGS, GPT  # noqa: E402
from operators import GRAPH, KEPT, PLAIN, SAMPLES, SHAPE, D, Run, opcheck  # noqa: E402

DEVICE = torch.device(os.environ.get("LIBDC_TEST_DEVICE") or "cpu")
ON_CARD = DEVICE.type == "cuda"
STEPS = 200 if ON_CARD else 4
_seeded = threading.Lock()  # threads share PyTorch's generator
NAMES = list(SAMPLES) if ON_CARD else ["reduce_grad", "reload_tensor"]  # test_ops_fakes.py has all of them on the CPU


@pytest.fixture
def run() -> Iterator[Run]:
    with DEVICE:
        run = Run()
        run.gather(PLAIN)
        run.gather(KEPT)
        x = torch.randn(SHAPE)
        D.offload_tensor(x, GRAPH, 1)
        D.wait_reload(D.reload_tensor(x, GRAPH, 1), GRAPH, 1)
        yield run
        dc.cleanup()


@pytest.mark.parametrize("name", NAMES)
def test_operators(run: Run, name: str) -> None:
    for args in SAMPLES[name](run, torch.randn(SHAPE)):
        opcheck(name, args)


def losses(stage: int, comm: libdc.Comm, steps: int = STEPS, backend: str = "", ours: bool = False) -> List[float]:
    """The bits of a training's losses, of one rank."""
    config = CONFIGS["tiny"]
    generator = torch.Generator().manual_seed(1 + comm.rank)
    batches = torch.randint(256, (steps, config.batch, config.seq + 1), generator=generator).to(DEVICE)
    with _seeded, DEVICE:
        torch.manual_seed(0)
        model = GPT(config)
    dct.shard(model, stage=stage, comm=comm)
    call = torch.compile(model, backend=backend) if backend else model
    optimizer = (optim.AdamW(model.parameters(), lr=1e-3) if ours
                 else torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))
    found = []
    for batch in batches:
        loss = call(batch[:, :-1], batch[:, 1:])
        loss.backward()
        dct.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).tolist()


@contextlib.contextmanager
def one_order() -> Iterator[None]:
    """The same sums in the same order in each run, by this thread's backward too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def rank_thread(comm: libdc.Comm, stage: int) -> List[float]:
    """On a card, ranks that are threads have a stream each, and do their backwards themselves."""
    with contextlib.ExitStack() as stack:
        if ON_CARD:
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        return losses(stage, comm)


def test_stages_have_the_same_losses() -> None:
    with one_order():
        of_stage = [losses(stage, libdc.Comm.single()) for stage in range(4)]
    assert of_stage[1:] == of_stage[:1] * 3 and of_stage[0][-1] < of_stage[0][0]


def test_stages_have_the_same_losses_on_two_ranks() -> None:
    with one_order():
        of_stage = [threads(2, lambda comm: rank_thread(comm, stage)) for stage in range(4)]
    assert of_stage[1:] == of_stage[:1] * 3


def test_stages_have_the_same_losses_with_our_optimizer() -> None:
    with one_order():
        of_stage = [losses(stage, libdc.Comm.single(), ours=True) for stage in (0, 3)]
    assert of_stage[0] == of_stage[1] and of_stage[0][-1] < of_stage[0][0]


@pytest.mark.parametrize("kind, options, piece", [(optim.Muon, {"precision": "float32"}, "momentum.0"),
                                                  (optim.Shampoo, {"eps_rel": 1e-3}, "factor.0.0"),
                                                  (optim.SOAP, {}, "factor.0.0")])  # fmt: skip
def test_optimizers_of_blocks_are_near_the_cpus(kind: Any, options: Any, piece: str) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = [(16, 16), (5, 1) if kind is optim.Muon else (5,), (0, 3), (4, 3, 5)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    here, there = ([torch.nn.Parameter(value.clone().to(device)) for value in start] for device in ("cpu", DEVICE))
    optimizers = [kind(params, lr=1e-2, **options) for params in (here, there)]
    for _ in range(4):
        grads = [torch.randn(value.shape, generator=generator) for value in start]
        for params, optimizer in zip((here, there), optimizers):
            for param, grad in zip(params, grads):
                param.grad = grad.to(param.device)
            optimizer.step()
    for p, q in zip(here, there):
        assert torch.allclose(p.detach(), q.detach().cpu(), rtol=1e-3, atol=1e-3)
        assert optimizers[0].state[p].keys() == optimizers[1].state[q].keys()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    pieces = [optimizer.state[params[0]][piece] for params, optimizer in zip((here, there), optimizers)]
    assert pieces[1].device == there[0].device and torch.equal(pieces[0], pieces[1].cpu())


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_kfac_is_near_the_cpus(fisher: str) -> None:
    torch.manual_seed(11)
    here = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1, groups=1), torch.nn.Flatten(), torch.nn.Tanh(),
                               torch.nn.Linear(4 * 36, 5))
    there = copy.deepcopy(here).to(DEVICE)
    x, noise = torch.randn(8, 3, 6, 6), torch.randn(8, 5)
    optimizers = [optim.KFAC(model, lr=0.05, damping=0.1, refresh_frequency=2, fisher=fisher)
                  for model in (here, there)]
    for _ in range(4):
        for model, optimizer in zip((here, there), optimizers):
            where = next(model.parameters()).device
            out = model(x.to(where))
            optimizer.zero_grad()
            if fisher == "sampled":  # targets that both have
                targets = out.detach() + noise.to(where)
                optimizer.accumulate(torch.nn.functional.mse_loss(out, targets), retain_graph=True)
            torch.nn.functional.mse_loss(out, noise.to(where)).backward()
            optimizer.step()
    for p, q in zip(here.parameters(), there.parameters()):
        assert torch.allclose(p.detach(), q.detach().cpu(), rtol=1e-3, atol=1e-3)
    weight = there[3].weight
    assert optimizers[1].state[weight]["factor_a"].device == weight.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, options", [(optim.AdamW, {"amsgrad": True}), (optim.SGD, {"momentum": 0.9})])
def test_optimizers_have_the_bits_of_the_cpu(kind: Any, options: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in [(33, 17), (1,), (0, 3), (1000,)]]
    here, there = ([torch.nn.Parameter(value.clone().to(device)) for value in start] for device in ("cpu", DEVICE))
    sides = [(here, kind(here, lr=1e-2, **options)), (there, kind(there, lr=1e-2, **options))]
    for step in range(6):
        if step == 3:  # a state goes from one to the other
            saved = [optimizer.state_dict() for _, optimizer in sides]
            sides = [(params, kind(params, lr=1e-2, **options)) for params, _ in sides]
            for (_, optimizer), state in zip(sides, saved[::-1]):
                optimizer.load_state_dict(state)
        grads = [torch.randn(value.shape, generator=generator).to(dtype) for value in start]
        for params, optimizer in sides:
            for param, grad in zip(params, grads):
                param.grad = grad.to(param.device) * 0.5  # work of the current stream that the step must see
            optimizer.step()
    for p, q in zip(here, there):
        assert torch.equal(p.detach(), q.detach().cpu())
        states = [optimizer.state[param] for param, (_, optimizer) in zip((p, q), sides)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert states[1][name].device == q.device, name
            assert torch.equal(value, states[1][name].cpu()), name


# Greatest error in units of the greatest value.
@pytest.mark.parametrize("dtype, gate", [(torch.float32, 2e-5), (torch.bfloat16, 2.5e-2)])
@pytest.mark.parametrize("how", ["plain", "masked", "packed", "compiled"])
def test_the_layer_is_the_cpus_within_rounding(how: str, dtype: torch.dtype, gate: float) -> None:
    hidden, heads, batch, seq = (256, 4, 3, 130) if ON_CARD else (64, 2, 2, 9)
    config = LayerConfig(hidden, heads, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1, seed=2, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    shape = (batch * seq, hidden) if how == "packed" else (batch, seq, hidden)
    start, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    given = {}
    if how == "packed":
        given = {"cu_seqlens": torch.tensor([0, seq - 2, seq - 2, batch * seq], dtype=torch.int32)}
    elif how == "masked":
        given = {"attention_mask": -1e4 * (torch.rand(batch, seq, generator=generator) < 0.2).float()}
    found = []
    for device in ("cpu", DEVICE):
        module = dct.TransformerLayer(config, device=device)
        call = torch.compile(module, backend="aot_eager") if how == "compiled" and device == DEVICE else module
        x = start.clone().to(device).requires_grad_()  # work of the current stream that the layer must see
        out = call(x, **{key: value if key == "cu_seqlens" else value.to(device) for key, value in given.items()},
                   offset=5)
        out.backward(grad.to(device))
        found.append([value.detach().cpu() for value in (out, x.grad, *(p.grad for p in module.parameters()))])
        assert out.device == x.grad.device == module.attn_ow.grad.device == x.device
    for here, there in zip(*found):
        assert (here - there).float().abs().max() <= gate * here.float().abs().max()


@pytest.mark.skipif(ON_CARD, reason="scripts/gpu-check runs it whole")
def test_the_speed_rows_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench" / "card"))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)  # it would take longer than all of this
    import bench_card_layer as bench

    options = "--device cpu --hidden 64 --heads 2 --seq 16 --tokens 32 --rounds 3 --steps 1 --peak 2".split()
    found = bench.measure(bench.parse(options))
    assert found["flops"] == 3 * 32 * (8 * 64 * 64 + 4 * 64 * 256 + 4 * 64 * 16) and found["card"] == "cpu"
    for name in ("libdc", "compiled"):
        row = found[name]
        assert row["tflops"] == pytest.approx(found["flops"] / row["ms"] / 1e9)
        assert row["share"] == pytest.approx(row["tflops"] / 2)
    assert found["libdc"]["kept"] == found["kept_formula"] + 8  # the dropout's offset
    assert bench.peak_of("NVIDIA H100 80GB HBM3") == 989.4 and bench.peak_of("NVIDIA H100 PCIe") == 756.0
    assert bench.peak_of("NVIDIA A100-SXM4-80GB") == 312.0 and bench.peak_of("a toaster") is None
    with pytest.raises(SystemExit):
        bench.parse(["--tokens", "100"])


@pytest.mark.skipif(not ON_CARD, reason="needs a card; test_compile.py has it on the CPU")
def test_a_compiled_step_has_the_bits_of_eager_mode() -> None:
    with one_order():
        comm = libdc.Comm.single()
        assert losses(3, comm, 3, "libdc") == losses(3, comm, 3)


def test_collectives_of_the_backend() -> None:
    dist.init_process_group("libdc", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, out = torch.arange(3.0, device=DEVICE), torch.zeros(3, device=DEVICE)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(out, x)
        dist.barrier()
        assert out.tolist() == [0, 1, 2]
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not ON_CARD, reason="needs a card, for its streams")
def test_ranks_that_share_a_stream_are_refused() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match="share CUDA's default stream"):
            dct.shard(torch.nn.Linear(3, 3, device=DEVICE), comm=comm)

    threads(2, rank)


def train(stage: int, captured: bool, steps: int = 5) -> List[torch.Tensor]:
    """Losses of a sharded model's steps, after some that warm up, and what it computes between them. With a scaler and
    with clipping; as PyTorch's users capture a whole step."""
    generator = torch.Generator().manual_seed(9)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 5))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    model = dct.shard(model.to(DEVICE), stage, comm=libdc.Comm.single())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=4)
    x, y = torch.zeros(8, 16, device=DEVICE), torch.zeros(8, 5, device=DEVICE)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        dct.clip_grad_norm_(model, 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    launch = step
    with warming_up() if captured else contextlib.nullcontext():
        for _ in range(3):
            step()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = step()

        def launch() -> torch.Tensor:
            graph.replay()
            return static.clone()

    found = []
    for number in range(steps):
        for tensor in (x, y):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        if number == 2:
            x[0, 0] = float("inf")  # a step that is left out
        loss = launch()
        if number != 2:
            found.append(loss)
        with torch.no_grad():
            found.append(model(y.new_ones(2, 16)))  # without the graph, between its launches
    found.append(torch.tensor([scaler.get_scale(), optimizer.skipped_steps]))
    return [value.cpu() for value in found]


@contextlib.contextmanager
def warming_up() -> Iterator[None]:
    """On a stream of its own, as torch.cuda.graph wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("stage", range(4))
def test_launches_of_a_captured_training_step(stage: int) -> None:
    """Elsewhere than on a card the step is not captured."""
    with one_order():
        plain, captured = train(stage, False), train(stage, ON_CARD)
    for one, other in zip(plain, captured):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert plain[-1].tolist() == [2.0**10, 1.0]


@pytest.mark.parametrize("kind, options", [(optim.AdamW, {}), (optim.SGD, {"momentum": 0.9})])
def test_launches_of_a_captured_step_are_steps(kind: Any, options: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(1000, generator=generator)
    sides = []
    for device in ("cpu", DEVICE):
        param = torch.nn.Parameter(start.clone().to(device))
        param.grad = torch.zeros_like(param)
        sides.append((param, kind([param], lr=1e-2, check_finite=True, **options)))
    steps = [optimizer.step for _, optimizer in sides]
    for step in steps:
        step()  # makes the state
    if ON_CARD:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sides[1][1].step()
        steps[1] = graph.replay
    for number in range(5):
        grad = torch.randn(1000, generator=generator)
        for (param, optimizer), step in zip(sides, steps):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            optimizer.sync_groups()
            assert param.grad is not None
            param.grad.copy_(grad)
            step()
    if ON_CARD:  # elsewhere it is an error
        assert sides[1][0].grad is not None
        sides[1][0].grad.fill_(float("inf"))
        steps[1]()
        assert sides[1][1].skipped_steps == 1
    (p, one), (q, other) = sides
    assert torch.equal(p.detach(), q.detach().cpu())
    for name, value in one.state[p].items():
        assert torch.equal(value, other.state[q][name].cpu()), name
