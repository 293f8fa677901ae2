"""TransformerLayer's handles live as long as modules and graphs use them."""

from __future__ import annotations

import copy
import pickle
import weakref

import torch
from libdc.torch import TransformerLayer
from libdc.torch.transformer import layer
from libdc.transformer import LayerConfig


def test_handles_are_freed_with_their_modules() -> None:
    config = LayerConfig(hidden_size=64, heads=2, seed=77)
    module = TransformerLayer(config)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    x = torch.ones(1, 4, 64, requires_grad=True)
    number = layer._config_id(config, torch.float32)
    out = module(x)
    handle = weakref.ref(layer._layer_for(x.device, number))
    for each in copies:
        each(x)
    del module, copies, each
    assert handle() is not None  # the graph has a backward to run
    out.sum().backward()
    del out
    assert handle() is None and number not in layer._layers
