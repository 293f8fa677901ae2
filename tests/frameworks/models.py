"""Small models and data of the tests of frameworks."""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch import Tensor, nn

SAMPLES = 96
WORDS = 97
STEPS, SAVED_AT = 30, 16  # an epoch has 4 steps of 24 samples


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                        pad_token_id=0, bos_token_id=1, eos_token_id=2))


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random texts of the same length."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Dict[str, Tensor]:
        ids = torch.randint(3, WORDS, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 3))


def numbers() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, x @ torch.randn(8, 3, generator=generator))
