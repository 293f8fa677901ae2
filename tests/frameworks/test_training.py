"""Runs of Transformers' Trainer, Accelerate and Lightning on a sharded model have the losses of one process without
libdc at each step. They go on from a checkpoint that another number of ranks wrote. And what adapters.py does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
from models import SAVED_AT, STEPS

FRAMEWORKS = "trainer", "accelerate", "lightning"
ROUNDING = 1e-5  # of float32, in losses of about 5


@pytest.fixture(scope="module")
def runs(launch: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """The results: of one process, of two ranks, and of three that go on from the two's checkpoints."""
    folders = {what: tmp_path_factory.mktemp(what) for what in ("alone", "shard", "resume")}
    launch(0, "train.py", "alone", str(folders["alone"]))
    launch(2, "train.py", "shard", str(folders["shard"]), str(folders["alone"]))
    launch(3, "train.py", "resume", str(folders["resume"]), str(folders["shard"]))
    return {what: json.loads((folder / "0.json").read_text()) for what, folder in folders.items()} | {
        "other": json.loads((folders["shard"] / "1.json").read_text())}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_have_the_losses_of_one_process(runs: Dict[str, Any], framework: str) -> None:
    alone, sharded = (runs[what][f"train_by_{framework}"] for what in ("alone", "shard"))
    assert alone.keys() == sharded.keys() and len(alone["loss"]) == STEPS
    for key, values in alone.items():
        assert sharded[key] == pytest.approx(values, abs=ROUNDING), key


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_three_ranks_go_on_from_the_checkpoint_of_two(runs: Dict[str, Any], framework: str) -> None:
    """From stage 3, at stage 1."""
    alone, resumed = (runs[what][f"train_by_{framework}"] for what in ("alone", "resume"))
    for key, values in alone.items():
        begin = SAVED_AT if len(values) == STEPS else 0
        assert resumed[key][begin:] == pytest.approx(values[begin:], abs=ROUNDING), key


@pytest.mark.parametrize("framework", ["trainer", "lightning"])
def test_ranks_go_on_from_a_checkpoint_without_libdc(runs: Dict[str, Any], framework: str) -> None:
    losses = runs["alone"][f"train_by_{framework}"]["loss"]
    assert runs["shard"][f"{framework}_goes_on"][SAVED_AT:] == pytest.approx(losses[SAVED_AT:][:2], abs=ROUNDING)


def test_lora(runs: Dict[str, Any]) -> None:
    """Trained, merged and not, saved, and merged for good; added before shard(), or between two."""
    found = runs["shard"]["lora"]
    for form in ("trained", "merged", "unmerged", "saved", "merged and unloaded", "added later"):
        assert found[form] == pytest.approx(found["expected"], abs=ROUNDING), form
    assert found["disabled"] == pytest.approx(found["base"], abs=ROUNDING)


def test_a_model_on_meta_gets_weights_from_a_folder_of_hugging_face(runs: Dict[str, Any]) -> None:
    found = runs["shard"]["load_on_meta"]
    assert found["loaded"] == found["initialized"] == found["expected"]


def test_ranks_generate_texts_of_different_lengths(runs: Dict[str, Any]) -> None:
    for what in ("shard", "other"):
        found, expected = runs[what]["generate"]
        assert found == expected


def test_a_forward_that_was_put_in_place_of_the_models(runs: Dict[str, Any]) -> None:
    found, expected = runs["shard"]["replaced_forward"]
    assert found == pytest.approx(expected, abs=ROUNDING)


def test_a_model_of_which_only_a_part_is_sharded(runs: Dict[str, Any]) -> None:
    assert "1.weight is not sharded, so that its gradient would not be averaged" in runs["shard"]["prepare_a_part"]


def test_sharded_and_plain_models_in_one_state(runs: Dict[str, Any]) -> None:
    """With safe_serialization and without."""
    assert runs["shard"]["save_beside_plain"] == runs["other"]["save_beside_plain"] == [[True] * 4] * 2


def test_states_that_a_hook_has_set(runs: Dict[str, Any]) -> None:
    """They are in no file, so that is an error on all ranks; what has a key of its own is saved."""
    for what in ("shard", "other"):
        *errors, saved = runs[what]["save_with_hooks"]
        assert len(errors) == 2 and all("must leave them empty" in error for error in errors)
        assert saved == "[[1.0, 1.0, 1.0]]"


def test_a_prepared_model_is_compiled(runs: Dict[str, Any]) -> None:
    """Once for training and once for eval mode."""
    found = runs["shard"]["compile_prepared"]
    assert (found["graphs"], found["breaks"]) == (2, 0)
    assert found["compiled"] == pytest.approx(found["eager"], abs=ROUNDING)


def test_frameworks_that_count_other_processes(launch: Callable[..., str]) -> None:
    """All three, with the Trainer's by Accelerate. Models of a part that the program chose are as before."""
    def lines(what: str) -> List[str]:
        return sorted(line for line in launch(2, "ranks.py", what).splitlines() if line[:2] in ("0 ", "1 "))

    text = "{0} {1} takes this process for number {2}, but it is rank {3} of the model's 2"
    assert lines("srun") == [text.format(rank, name, "0 of 1", rank)
                             for rank in range(2) for name in ("Accelerate", "Accelerate", "Lightning")]
    assert lines("parts") == [line for rank in range(2) for line in (
        text.format(rank, "Accelerate", f"{rank} of 2", 1 - rank), f"{rank} no error")]
