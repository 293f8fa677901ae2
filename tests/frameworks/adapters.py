"""Two ranks with peft's LoRA, generation, and a forward of TRL's kind: train.py runs them before its own."""

from __future__ import annotations

import types
from typing import Any, Dict, List, Tuple

import torch
from models import WORDS, llama
from torch import Tensor, nn

import libdc.torch as dct
from libdc.torch.frameworks.accelerate import Accelerator

IDS = torch.randint(3, WORDS, (4, 12), generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(input_ids=IDS, labels=IDS).loss)


def train(model: Any, ids: Tensor) -> None:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_adapter(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0,
                                                      init_lora_weights=False))


def lora(folder: str) -> Dict[str, Any]:
    """Losses of an adapter that was trained for three steps, in each form that it can have afterwards."""
    import peft

    ranks = dct.init()
    expected = with_adapter(llama())
    train(expected, IDS)
    model = dct.shard(with_adapter(llama()), 3)
    train(model, IDS[2 * ranks.rank : 2 * ranks.rank + 2])
    losses: Dict[str, Any] = {"expected": loss_of(expected), "trained": loss_of(model)}
    with dct.gathered(model):
        model.merge_adapter()
    losses["merged"] = loss_of(model)
    with dct.gathered(model):
        model.unmerge_adapter()
    losses["unmerged"] = loss_of(model)
    with model.disable_adapter():
        losses["disabled"] = loss_of(model)
    whole = dct.full_state_dict(model, rank0_only=True)
    if ranks.rank == 0:
        model.save_pretrained(folder, state_dict=whole)
    ranks.barrier()
    losses["saved"] = loss_of(peft.PeftModel.from_pretrained(llama(), folder))
    with dct.gathered(model):
        losses["merged and unloaded"] = loss_of(model.merge_and_unload())
    losses["base"] = loss_of(llama())
    later = with_adapter(dct.shard(llama(), 3))
    dct.shard(later.get_base_model(), 3)
    train(later, IDS[2 * ranks.rank : 2 * ranks.rank + 2])
    losses["added later"] = loss_of(later)
    return losses


def load_on_meta(folder: str) -> Dict[str, float]:
    """The loss of a model that has no memory before shard(), with weights from a folder of save_pretrained()."""
    from accelerate import init_empty_weights

    expected = llama()
    if dct.init().rank == 0:
        expected.save_pretrained(folder)
    dct.init().barrier()
    with init_empty_weights():
        model = llama()
    dct.load_checkpoint(dct.shard(model, 3), folder)
    with torch.device("meta"):
        other = llama()
    dct.shard(other, 3)
    torch.manual_seed(0)
    other.init_weights()
    other.load_state_dict(expected.state_dict())
    return {"expected": loss_of(expected), "loaded": loss_of(model), "initialized": loss_of(other)}


def generate() -> Tuple[List[int], List[int]]:
    """Texts that end after another number of words on each rank."""
    rank = dct.init().rank
    words = {"max_new_tokens": 3 + 2 * rank, "do_sample": False}
    expected = llama().eval().generate(IDS[rank : rank + 1, :5], **words)
    model = Accelerator(cpu=True).prepare(dct.shard(llama().eval(), 3))
    found = model.generate(IDS[rank : rank + 1, :5], **words)
    return found[0].tolist(), expected[0].tolist()


def compile_prepared() -> Dict[str, Any]:
    """Losses of a prepared model in eager mode and compiled, of three steps and one in eval mode, and graph breaks."""
    from torch._dynamo.utils import counters

    def losses(compiled: bool) -> List[float]:
        torch.manual_seed(0)
        model = dct.shard(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9), nn.Linear(3, 1)), 3)
        model = Accelerator(cpu=True).prepare(model)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        call = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(4):
            model.train(step < 3)
            loss = call(torch.ones(2, 3)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    counters.clear()
    return {"eager": losses(False), "compiled": losses(True), "breaks": sum(counters["graph_break"].values()),
            "graphs": counters["stats"]["unique_graphs"]}


def save_beside_plain(folder: str, safe: bool) -> List[bool]:
    """Whether each of two sharded and two plain models has its own weights again, all of the same shapes."""
    from torch.optim import SGD

    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(3, 2) for _ in range(4)]
    prepared = accelerator.prepare(*(dct.shard(model, 3) if number % 2 == 0 else model
                                     for number, model in enumerate(models)))
    accelerator.prepare(*(SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models))
    for number, model in enumerate(models):
        nn.init.constant_(model.weight, number)
    accelerator.save_state(folder, safe_serialization=safe)
    for model in models:
        nn.init.constant_(model.weight, -1)
    accelerator.load_state(folder)
    return [bool((accelerator.get_state_dict(model).get("weight", torch.tensor(number)) == number).all())
            for number, model in enumerate(prepared)]


def save_with_hooks(folder: str) -> List[str]:
    """Errors of Lightning's checkpoints for which a hook has set weights, or an optimizer's state, on rank 1 alone. The
    last one has another key, and is the value in the file."""
    import pytorch_lightning

    from libdc.torch.frameworks.lightning import LibdcStrategy

    class Averaged(pytorch_lightning.LightningModule):
        def __init__(self, key: str, value: Any) -> None:
            super().__init__()
            self.layer, self.key, self.value = nn.Linear(3, 1), key, value

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_save_checkpoint(self, checkpoint: Dict[str, Any]) -> None:
            if self.global_rank == 1 or self.key == "averaged":
                checkpoint[self.key] = self.value

    found = []
    weights = {"layer.weight": torch.ones(1, 3)}
    for key, value in (("state_dict", weights), ("optimizer_states", [weights]), ("averaged", weights)):
        trainer = pytorch_lightning.Trainer(
            max_steps=1, accelerator="cpu", devices=dct.init().size, strategy=LibdcStrategy(3), logger=False,
            enable_progress_bar=False, enable_checkpointing=False)
        trainer.fit(Averaged(key, value), torch.utils.data.DataLoader(torch.ones(4, 3)))
        try:
            trainer.save_checkpoint(folder)
            found.append(str(torch.load(f"{folder}/meta.pt", weights_only=False)[key]["layer.weight"].tolist()))
        except (RuntimeError, KeyError) as error:
            found.append(str(error))
    return found


def forward_in_tiles(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
    """The loss without all logits at once: reads the head's weight outside of the head, as TRL does."""
    hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1].reshape(-1, self.config.hidden_size)
    total = torch.zeros(())
    for rows, targets in zip(hidden.split(16), labels[:, 1:].reshape(-1).split(16)):
        total = total + nn.functional.cross_entropy(rows @ self.lm_head.weight.T, targets, reduction="sum")
    return types.SimpleNamespace(loss=total / hidden.shape[0])


def prepare_a_part() -> str:
    """The error where only a part of what is trained is sharded."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    dct.shard(model[0], 3)
    try:
        Accelerator(cpu=True).prepare(model)
    except ValueError as error:
        return str(error)
    return "no error"


def replaced_forward() -> Tuple[float, float]:
    """The loss after three steps with a forward that is put in place of the model's, after shard()."""
    ranks = dct.init()
    expected = llama()
    train(expected, IDS)
    model = dct.shard(llama(), 3)
    model.forward = types.MethodType(forward_in_tiles, model)
    model = Accelerator(cpu=True).prepare(model)
    train(model, IDS[2 * ranks.rank : 2 * ranks.rank + 2])
    return loss_of(model), loss_of(expected)
