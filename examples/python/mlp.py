"""ZeRO-3 from Python without PyTorch: two ranks, as threads, teach a small network to read digits. Each holds
half of the weights and of their gradients; whole weights exist only between gather and release. Prints the loss and its
bits, which are those that examples/c/mlp.c and examples/rust/mlp.rs print.

SPDX-License-Identifier: Apache-2.0"""

from __future__ import annotations

import struct
from array import array
from typing import Iterator, List, Sequence, Tuple

import libdc
import libdc.run

RANKS, BATCH, STEPS, RATE = 2, 40, 60, 0.0625
PIXELS, HIDDEN, DIGITS = 64, 16, 10
ROW1, ROW2 = PIXELS + 1, HIDDEN + 1  # weights, then the bias
GRAPH, W1, W2 = 1, 10, 20

FONT = [
    0x3C666E7666663C00, 0x1818381818187E00, 0x3C66060C30607E00, 0x3C66061C06663C00, 0x060E1E667F060600,
    0x7E607C0606663C00, 0x3C66607C66663C00, 0x7E660C1818181800, 0x3C66663C66663C00, 0x3C66663E06663C00,
]  # fmt: skip


def random(state: int) -> Iterator[int]:
    """A generator that is the same in every language: Knuth's MMIX, upper half."""
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 32


def picture(number: int) -> Tuple[int, List[float]]:
    """A digit drawn in 64 pixels with noise; the same number gives the same picture."""
    digit, noise = number % DIGITS, random(number + 1)
    return digit, [((12 if FONT[digit] >> (63 - at) & 1 else 0) + (next(noise) >> 30)) / 16 for at in range(PIXELS)]


def learn(number: int, w1: Sequence[float], w2: Sequence[float], g1: array, g2: array) -> float:
    """Returns one picture's loss, and adds its gradient to g1 and g2."""
    digit, x = picture(number)
    h, dh, loss = [], [0.0] * HIDDEN, 0.0
    for j in range(HIDDEN):
        total = w1[j * ROW1 + PIXELS]
        for k in range(PIXELS):
            total += w1[j * ROW1 + k] * x[k]
        h.append(max(total, 0.0))
    for c in range(DIGITS):
        total = w2[c * ROW2 + HIDDEN]
        for j in range(HIDDEN):
            total += w2[c * ROW2 + j] * h[j]
        error = total - (c == digit)
        loss += error * error
        d = 2 * error / (BATCH // RANKS)
        for j in range(HIDDEN):
            g2[c * ROW2 + j] += d * h[j]
            dh[j] += d * w2[c * ROW2 + j]
        g2[c * ROW2 + HIDDEN] += d
    for j in range(HIDDEN):
        if h[j] > 0:
            for k in range(PIXELS):
                g1[j * ROW1 + k] += dh[j] * x[k]
            g1[j * ROW1 + PIXELS] += dh[j]
    return loss


def train(comm: libdc.Comm) -> List[float]:
    losses, noise = [], random(0)
    with libdc.Context() as context:
        context.init(comm, initial_reduce_bucket_size=4096)
        shapes = {W1: (HIDDEN, ROW1), W2: (DIGITS, ROW2)}
        shards, grads = {}, {}
        for (id, (rows, columns)), scale in zip(shapes.items(), (8, 4)):
            whole = [((next(noise) >> 16) - 32768) / (32768 * scale) for _ in range(rows * columns)]
            half = rows * columns // RANKS
            shards[id] = array("d", whole[comm.rank * half : (comm.rank + 1) * half])
            grads[id] = array("d", [0.0]) * half
            context.register_z3_param(id, shapes[id], shards[id], grads[id])
        context.register_graph_z3(GRAPH, [W1, W2])

        for step in range(STEPS):
            context.start_backward(True)
            context.prefetch_params_fused(GRAPH, [W1, W2])
            full = {}
            for id in shapes:
                weights = context.wait_allgather(context.allgather_param(None, GRAPH, id), GRAPH, id)
                full[id] = weights.numpy().ravel().tolist()
                context.release_param(None, GRAPH, id)
            own = {id: array("d", [0.0]) * len(full[id]) for id in shapes}
            numbers = range(step * BATCH + comm.rank, (step + 1) * BATCH, RANKS)
            loss = array("d", [sum(learn(number, full[W1], full[W2], own[W1], own[W2]) for number in numbers)])
            for id in shapes:
                context.reduce_grad(own[id], GRAPH, id)
            context.end_backward(GRAPH)  # grads: this rank's half of the mean over ranks
            for id, shard in shards.items():
                for at, grad in enumerate(grads[id]):
                    shard[at] -= RATE * grad
            context.params_updated([W1, W2])
            loss[0] /= BATCH // RANKS
            comm.all_reduce(loss, libdc.ReduceOp.MEAN)
            losses.append(loss[0])
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(libdc.run.threads(RANKS, train)[0]):
        print(f"step {step:2} loss {loss:.6f} {struct.unpack('<Q', struct.pack('<d', loss))[0]:016x}")
