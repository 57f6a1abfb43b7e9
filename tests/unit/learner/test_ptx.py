"""Text mixed into reinforcement learning: what is trained of it, its gradient, and its place in the data."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from buffer.examples import Example
from buffer.records import Batch, Group, Trajectory
from learner.config import LearnerExperiment, PtxConfig
from learner.model import build_model
from learner.optimizer import make_trainable
from learner.ptx import TextReport, Texts
from learner.step import Updater

END, LONGEST = 2, 12
TEXTS = ["5 6 7 8 9", "10", "", "11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26", "27 28 2"]
"""Of five tokens; of one and of none; too long; and one with its end mark."""
KEPT = [[5, 6, 7, 8, 9, END], [10, END], [*range(11, 23)], [27, 28, END]]


class Words:
    """A tokenizer of numbers."""

    eos_token_id = END
    name_or_path = "words"

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def convert_ids_to_tokens(self, number: int) -> str:
        return str(number)


class Rows:
    """Endless, and at a place."""

    def __init__(self) -> None:
        self.draw = 0

    def __len__(self) -> int:
        return len(TEXTS)

    def take(self, count: int) -> list[Example]:
        self.draw += count
        # An empty prompt is no Example: this one is made of nothing but a blank.
        draws = range(self.draw - count, self.draw)
        return [Example(TEXTS[n % len(TEXTS)] or " ", (), (), {}) for n in draws]

    @property
    def position(self):
        return {"draw": self.draw}

    def seek(self, position) -> None:
        self.draw = position["draw"]


def texts(batch_size=5, coefficient=2.5, vocabulary=67) -> Texts:
    fields = {"data": {"kind": "jsonl", "path": "x"}, "batch_size": batch_size, "coefficient": coefficient}
    return Texts(PtxConfig.model_validate(fields), Rows(), Words(), LONGEST, 64, vocabulary)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=67, tie_word_embeddings=True, **sizes)).save_pretrained(path)
    return path


def test_every_token_but_the_first_is_trained_behind_what_stands_before_it(one_process):
    report = TextReport()
    part = texts().next(report)
    found = []
    for batch in part.micro_batches:
        for segment in batch.segments:
            places = range(segment.start, segment.start + segment.length)
            found.append(batch.token_ids[0, list(places)].tolist())
        at = batch.target_positions + 1
        assert torch.equal(batch.token_ids[0, at], batch.target_ids)
    assert sorted(found) == sorted(KEPT)
    assert part.tokens == sum(len(ids) - 1 for ids in KEPT)
    row = report.row()
    assert [row[f"ptx/{n}"] for n in ("texts", "cut", "left_out", "tokens")] == [4, 1, 1, part.tokens]


def test_a_place_in_the_data_is_all_that_a_resume_needs(one_process):
    one, two = texts(batch_size=3), texts(batch_size=3)
    one.next(TextReport())
    two.seek(one.position)
    for _ in range(3):
        parts = [t.next(TextReport()) for t in (one, two)]
        ids = [[b.token_ids.tolist() for b in part.micro_batches] for part in parts]
        assert ids[0] == ids[1]


def test_nothing_to_train_on_adds_no_micro_batch(one_process):
    mixed = texts(batch_size=1)
    mixed.seek({"draw": 2})
    report = TextReport()
    assert mixed.next(report).micro_batches == []
    assert report.row()["ptx/loss"] is None


def test_a_token_that_the_model_lacks_is_told_and_not_trained(one_process):
    with pytest.raises(
        ValueError, match=r"words: the tokenizer makes token 28 .* the model has 28; expected"
    ):
        texts(vocabulary=28).next(TextReport())


def batch() -> Batch:
    draw, made = np.random.default_rng(0), []
    for index in range(4):
        ids = draw.integers(3, 67, 10).astype(np.int32)
        ids[:3] = (5, 6, 7)
        mask = np.array([0] * 3 + [1] * 7, np.uint8)
        behavior = (draw.normal(-4.2, 0.1, 10) * mask).astype(np.float32)
        made.append(
            Trajectory(index, ids, mask, behavior, np.zeros(10, np.int32), float(index % 2), {}, "stop")
        )
    return Batch(0, (Group("g", "lease", "0", "train", tuple(made)),), {})


def updated(folder, mixed: Texts | None):
    """The report of one step, and the gradients that it left, of the embeddings and of the last norm."""
    fields = {
        "name": "x",
        "run_dir": "r",
        "model": {"path": str(folder), "dtype": "float32", "max_length": 64},
        "buffer": {"groups_per_batch": 1},
        "rollout": {"group_size": 4, "sampling": {"temperature": 0.5}},
        "learner": {"tokens_per_microbatch": 64, "optimizer": {"lr": 1e-9, "clip_grad": 0.0}},
    }
    of = LearnerExperiment.model_validate(fields)
    model = build_model(folder, of.learner.parallel, torch.float32)
    trainable = make_trainable(model, of.learner.optimizer, of.learner.parallel)
    report = Updater(of, trainable, None, texts=mixed).update(batch())
    named = dict(trainable.model.module.named_parameters())
    names = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
    return report, [named[name].main_grad.clone()[:67] for name in names]


def test_its_gradient_is_added_to_that_of_the_batch_at_temperature_one(one_process, folder):
    _, alone = updated(folder, None)
    report, both = updated(folder, texts())
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = torch.zeros(())
    for ids in KEPT:
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        total = total - logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum()
    loss = total / sum(len(ids) - 1 for ids in KEPT)
    (2.5 * loss).backward()
    assert report.row()["ptx/loss"] == pytest.approx(loss.item(), rel=1e-4)
    for found, other, own in zip(
        both, alone, (model.model.embed_tokens.weight.grad, model.model.norm.weight.grad), strict=True
    ):
        assert torch.allclose(found - other, own, rtol=1e-3, atol=1e-5)
    assert report.row()["gradient_fraction"] == 1, "the batch's own numbers count the batch alone"


def test_its_place_lies_in_the_updaters_position(one_process, folder):
    of = LearnerExperiment.model_validate({"name": "x", "run_dir": "r", "model": {"path": str(folder)}})
    model = build_model(folder, of.learner.parallel, torch.float32)
    trainable = make_trainable(model, of.learner.optimizer, of.learner.parallel)
    mixed = texts(batch_size=3)
    mixed.next(TextReport())
    position = Updater(of, trainable, None, texts=mixed).position()
    assert position["ptx"] == {"draw": 3}
    fresh = texts(batch_size=3)
    Updater(of, trainable, None, texts=fresh).restore(position)
    assert fresh.position == {"draw": 3}
    Updater(of, trainable, None, texts=fresh).restore({"kl_coefficient": 0.0})
    assert fresh.position == {"draw": 3}, "a run that had no text begins with the first"
