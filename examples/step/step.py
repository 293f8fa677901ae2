"""Three steps of AdamW on four weights, without NumPy and PyTorch: prints the bits that step.c prints.

    python step.py

SPDX-License-Identifier: Apache-2.0"""

import array
import sys

from libdc.optim.arrays import AdamW

weights, grads = array.array("f", [1, -2, 3, 0.5]), array.array("f", [0.5, 0.25, -1, 0])
adamw = AdamW(lr=0.01, weight_decay=0.1)
adamw.add_param((len(weights),))
for _ in range(3):
    adamw.step([weights], [grads])
for bits, weight in zip(memoryview(weights).cast("B").cast("I"), weights):
    print(f"{bits:08x} {weight:.6f}")
assert "numpy" not in sys.modules and "torch" not in sys.modules
