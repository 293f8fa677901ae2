"""Tiny Hugging Face models with random weights, trained at every stage beside one process.

    .venv/bin/python tests/transformers/zoo.py [--ranks 2] [--stages 0 1 2 3] [--steps 3] [MODEL ...]

prints a line for each model: how far the losses of the ranks are from those of one process with all batches. Ranks are
threads. Nothing is downloaded: a model is made from its configuration."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from from_pypi import install

    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.append(install(Path(__file__).with_name("requirements.txt")))

import libdc.run
import libdc.torch as dct

VOCABULARY = 97
LIMIT = 1e-5  # of a loss
_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DENSE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _random(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(7919 * step + rank + 1)


def _ids(step: int, rank: int, rows: int = 2, columns: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, columns), generator=_random(step, rank))


def _text(step: int, rank: int, **size: int) -> Dict[str, Tensor]:
    ids = _ids(step, rank, **size)
    return {"input_ids": ids, "labels": ids.clone()}


def _few_tokens(step: int, rank: int) -> Dict[str, Tensor]:
    """So few that experts get none."""
    return _text(step, rank, rows=1, columns=3)


def _masked(step: int, rank: int) -> Dict[str, Tensor]:
    ids = _ids(step, rank)
    hidden = torch.rand(ids.shape, generator=_random(step, rank + 50)) < 0.3
    hidden[0, 0] = True
    seen = torch.ones_like(ids)
    seen[0, -3:] = 0
    return {"input_ids": ids.masked_fill(hidden, 2), "labels": ids.masked_fill(~hidden, -100), "attention_mask": seen}


def _translation(step: int, rank: int) -> Dict[str, Tensor]:
    return {"input_ids": _ids(step, rank), "labels": _ids(step, rank + 99, columns=7)}


def _images(step: int, rank: int) -> Dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=_random(step, rank)),
            "labels": torch.randint(0, 5, (2,), generator=_random(step, rank))}


def _spectra(step: int, rank: int) -> Dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32, generator=_random(step, rank)),
            "labels": _ids(step, rank, columns=7)}


def _sound(step: int, rank: int) -> Dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400, generator=_random(step, rank)),
            "labels": torch.randint(1, 20, (2, 5), generator=_random(step, rank))}


class Entry(NamedTuple):
    """A model of the zoo: the names of its configuration and its class, arguments, and a batch of a step and rank."""

    config: str
    model: str
    arguments: Dict[str, Any]
    batch: Callable[[int, int], Dict[str, Tensor]]

    def make(self) -> nn.Module:
        import transformers

        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: nn.Module = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.arguments))
        return model.train()


_MOE = {**_TEXT, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64}
_WHISPER = {"num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
            "max_source_positions": 16, "max_target_positions": 32, "dropout": 0.0, "attention_dropout": 0.0,
            "activation_dropout": 0.0, "decoder_start_token_id": 1, "suppress_tokens": None,
            "begin_suppress_tokens": None}
_WAV2VEC2 = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4),
             "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
             "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
             "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "ctc_zero_infinity": True,
             "ctc_loss_reduction": "mean"}

ZOO = {
    "gpt2": Entry("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}, _text),
    "llama": Entry("LlamaConfig", "LlamaForCausalLM", {
        **_TEXT, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64}, _text),
    "bert": Entry("BertConfig", "BertForMaskedLM", {
        **_DENSE, **_DROPOUT, "vocab_size": VOCABULARY, "max_position_embeddings": 32}, _masked),
    "t5": Entry("T5Config", "T5ForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3,
        "dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": True}, _translation),
    "vit": Entry("ViTConfig", "ViTForImageClassification", {
        **_DENSE, **_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 5}, _images),
    "mixtral": Entry("MixtralConfig", "MixtralForCausalLM", {
        **_MOE, "num_local_experts": 6, "num_experts_per_tok": 1, "output_router_logits": True}, _few_tokens),
    "qwen2_moe": Entry("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {
        **_MOE, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1}, _few_tokens),
    "whisper": Entry("WhisperConfig", "WhisperForConditionalGeneration", {**_TEXT, **_WHISPER}, _spectra),
    "wav2vec2": Entry("Wav2Vec2Config", "Wav2Vec2ForCTC", _WAV2VEC2, _sound),
    "mamba": Entry("MambaConfig", "MambaForCausalLM", {
        **_TEXT, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 4, "expand": 2,
        "use_mambapy": False}, _text),
    "gemma2": Entry("Gemma2Config", "Gemma2ForCausalLM", {
        **_TEXT, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}, _text),
}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def reference(entry: Entry, ranks: int, steps: int) -> List[List[float]]:
    """Losses of one process by step and rank."""
    model = entry.make()
    optimizer = _optimizer(model)
    losses: List[List[float]] = []
    for step in range(steps):
        losses.append([])
        for rank in range(ranks):
            loss = model(**entry.batch(step, rank)).loss
            (loss / ranks).backward()
            losses[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharded(entry: Entry, models: List[nn.Module], stage: int, steps: int) -> List[List[float]]:
    """The same of ranks that are threads, whose models these are."""
    def rank(comm: Any) -> List[float]:
        model = models[comm.rank]
        dct.shard(model, stage, comm=comm, group_size=2000)
        optimizer = _optimizer(model)
        losses = []
        for step in range(steps):
            loss = model(**entry.batch(step, comm.rank)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    by_rank = libdc.run.threads(len(models), rank, timeout=120)
    return [list(step) for step in zip(*by_rank)]


def largest_difference(entry: Entry, stages: List[int], ranks: int, steps: int) -> Dict[int, float]:
    """For each stage, how far a loss is from one process's, relative to it."""
    expected = torch.tensor(reference(entry, ranks, steps), dtype=torch.float64)
    result = {}
    for stage in stages:
        models = [entry.make() for _ in range(ranks)]  # PyTorch's generator is one for all threads
        found = torch.tensor(sharded(entry, models, stage, steps), dtype=torch.float64)
        result[stage] = float(((found - expected).abs() / expected.abs()).max())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains tiny Hugging Face models at every stage, beside one process.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(ZOO))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.models if name not in ZOO]
    if unknown:
        parser.error(f"MODEL = {unknown[0]}, must be one of {', '.join(ZOO)}")
    torch.set_num_threads(1)
    wrong: List[Tuple[str, int]] = []
    print(f"{'model':12}" + "".join(f"stage {stage:<6}" for stage in arguments.stages) + "seconds")
    for name in arguments.models or ZOO:
        begin = time.monotonic()
        found = largest_difference(ZOO[name], arguments.stages, arguments.ranks, arguments.steps)
        wrong += [(name, stage) for stage, value in found.items() if not value <= LIMIT]
        print(f"{name:12}" + "".join(f"{value:<12.1e}" for value in found.values())
              + f"{time.monotonic() - begin:.1f}", flush=True)
    print(f"{len(arguments.models or ZOO)} models on {arguments.ranks} ranks; " +
          (f"a loss differs by more than {LIMIT}: {wrong}" if wrong else f"losses within {LIMIT} of one process's"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
