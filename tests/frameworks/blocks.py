"""Runs the programs of a page one after the other in one process, since each would import the same for seconds:
blocks.py PAGE. The first one's process group serves all."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch.distributed as dist

_init_process_group = dist.init_process_group


def init_once(*arguments: Any, **options: Any) -> None:
    if not dist.is_initialized():
        _init_process_group(*arguments, **options)


dist.init_process_group = init_once
with open(sys.argv[1], encoding="utf-8") as page:
    programs = re.findall(r"^```python\n(.*?)^```", page.read(), re.S | re.M)
for program in programs:
    exec(compile(program, sys.argv[1], "exec"), {"__name__": "__main__"})
print(len(programs), "programs have run", flush=True)
