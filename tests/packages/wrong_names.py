"""Names that libdc does not have, beside those that it has. Type checkers read this; nothing runs it."""

import libdc
import libdc.optim
from libdc.optim import arrays

libdc.optim.AdamW([], weight_decay=0.1)
libdc.optim.AdamW([], wieght_decay=0.1)  # wrong
libdc.optim.SGD([], momentun=0.9)  # wrong
libdc.optim.Muon([], polynomal="x")  # wrong
libdc.optim.Shampoo([], graft_beta=0.9)  # wrong
libdc.optim.SOAP([], max_blocks=3)  # wrong
libdc.optim.nothing  # wrong

arrays.AdamW(1e-3, weight_decay=0.1).set_group(1, beta1=0.5)
arrays.AdamW(1e-3, wieght_decay=0.1)  # wrong
arrays.AdamW(1e-3).set_group(1, wieght_decay=0.1)  # wrong
arrays.SGD(1e-3, momentun=0.9)  # wrong
arrays.Muon(1e-3, polynomal=3)  # wrong
arrays.Shampoo(1e-3, graft_beta=0.9)  # wrong
arrays.SOAP(1e-3, max_blocks=3)  # wrong
arrays.KFAC(1e-3, damping=0.1, kl_clip=None)
arrays.KFAC(1e-3, dampling=0.1)  # wrong
arrays.nothing  # wrong

libdc.run.threads
libdc.nothing  # wrong


def read(tensor: libdc.Tensor) -> memoryview:
    tensor.to_list()  # wrong
    tensor.tolist()
    return memoryview(tensor)
