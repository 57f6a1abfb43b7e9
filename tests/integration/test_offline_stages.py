"""SFT, reward model and DPO on real Megatron: they learn, agree with Hugging Face, resume, in any layout.

Starting a process takes most of the time, so runs share them (`offline_jobs.py`).
"""

import itertools
import shutil

import pytest
import torch
from offline_runs import BETA, END, PADDING, WORDS, Run, make_data, read, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from buffer.experiment import load
from launch.resuming import check_checkpoint
from learner import conversion
from learner.offline.config import OfflineExperiment

pytestmark = pytest.mark.slow

LEARNED = {"sft": (120, 1e-2), "reward": (40, 5e-3), "dpo": (25, 2e-3)}
"""Steps and learning rate with which a stage learns its made task."""
LORA = {"rank": 3, "alpha": 12, "modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}
COMPARED = ("loss", "grad_norm", "accuracy", "margin", "eval/loss", "eval/margin", "examples", "tokens")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline")
    make_data(folder)
    return folder


@pytest.fixture(scope="module")
def one(data):
    """Everything that one process does, in two starts: the first ends by SIGKILL in its last run."""
    root = data / "one"
    kinds = ("sft", "reward", "dpo")
    whole = {kind: Run(root / kind, data, kind) for kind in kinds}
    whole |= {"lora": Run(root / "lora", data, "dpo", lora=LORA)}
    killed = Run(root / "killed", data, "dpo", kill_at=4)
    train(1, [*whole.values(), killed], killed=True)
    shutil.copytree(root / "killed", root / "resumed")
    resumed = Run(root / "resumed", data, "dpo")
    learned = {
        f"learned-{kind}": Run(
            root / f"learned-{kind}", data, kind, steps=steps, lr=lr, checkpoint={"every": 1000}
        )
        for kind, (steps, lr) in LEARNED.items()
    }
    train(1, [resumed, *learned.values()])
    return {**whole, "killed": killed, "resumed": resumed, **learned}


@pytest.fixture(scope="module")
def two(data):
    """Layouts of two processes."""
    root = data / "two"
    layouts = {
        "sft": {"distributed_optimizer": True},
        "reward": {"tensor": 2},
        "dpo": {"pipeline": 2},
        "reward-pipeline": {"pipeline": 2},
    }
    runs = {name: Run(root / name, data, name.split("-")[0], layout=layouts[name]) for name in layouts}
    runs |= {
        "lora": Run(root / "lora", data, "dpo", layout={"tensor": 2}, lora=LORA),
        "lora-pipeline": Run(root / "p", data, "dpo", layout={"pipeline": 2}, lora=LORA, recompute=True),
    }
    train(2, list(runs.values()))
    return runs


def sequences(rows):
    """Per row its prompt's and each response's ids, the end mark with them, and the scores."""
    for row in rows:
        responses = row["response"] if isinstance(row["response"], list) else [row["response"]]
        prompt, *ids = ([WORDS.index(w) for w in text.split()] for text in (row["prompt"], *responses))
        yield prompt, [[*response, END] for response in ids], row.get("score")


@torch.no_grad()
def hf_logprob(model, prompt, response):
    """Σ log π of a response's tokens and end mark, from logits one place before each."""
    ids = torch.tensor([prompt + response])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs[len(prompt) - 1 :].gather(1, torch.tensor(response)[:, None]).sum().item()


def held_out_pairs(data, value):
    """A function of prompt and response, at the preferred and at the other one of every held-out pair."""
    found = []
    for prompt, responses, scores in sequences(read(data / "preferences-held-out.jsonl")):
        values = [value(prompt, response) for response in responses]
        pairs = itertools.permutations(range(len(values)), 2)
        found += [(values[i], values[j]) for i, j in pairs if scores[i] > scores[j]]
    return found


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_sft_teaches_a_model_what_to_answer_and_when_to_stop(data, one):
    rows = one["learned-sft"].rows
    assert rows[-1]["eval/loss"] < 0.1 < rows[0]["eval/loss"]
    model = AutoModelForCausalLM.from_pretrained(one["learned-sft"].model)
    for prompt, (response,), _ in sequences(read(data / "taught.jsonl")):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert made[0, len(prompt) :].tolist() == response


def test_the_sft_loss_is_hugging_faces(data, one):
    for folder, row in ((data / "model", one["sft"].rows[0]), (one["sft"].model, one["sft"].rows[-1])):
        model = AutoModelForCausalLM.from_pretrained(folder)
        losses, tokens = 0.0, 0
        for prompt, (response,), _ in sequences(read(data / "taught-held-out.jsonl")):
            labels = torch.tensor([[-100] * len(prompt) + response])
            with torch.no_grad():
                loss = model(torch.tensor([prompt + response]), labels=labels).loss
            losses, tokens = losses + loss.item() * len(response), tokens + len(response)
        assert row["eval/loss"] == pytest.approx(losses / tokens, rel=1e-4)


def test_the_reward_model_learns_a_preference(one):
    rows = one["learned-reward"].rows
    assert rows[0]["eval/accuracy"] < 0.8
    assert rows[-1]["eval/accuracy"] > 0.9


@pytest.mark.parametrize("name", ["reward", "learned-reward"])
def test_hugging_face_gives_the_reward_models_scores(data, one, name):
    """In one batch with padding: the end mark is not padding, though the source says so."""
    model = AutoModelForSequenceClassification.from_pretrained(one[name].model)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id is None, "it would score the token before the last of that id"
    model.config.pad_token_id = PADDING
    rows = sequences(read(data / "preferences-held-out.jsonl"))
    texts = [torch.tensor([*prompt, *response]) for prompt, responses, _ in rows for response in responses]
    assert len({len(text) for text in texts}) > 1
    batch = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PADDING)
    with torch.no_grad():
        values = model(batch, attention_mask=(batch != PADDING).long()).logits[:, 0].tolist()
    scores = dict(zip((tuple(text.tolist()) for text in texts), values, strict=True))

    pairs = held_out_pairs(data, lambda prompt, response: scores[*prompt, *response])
    row = one[name].rows[-1]
    assert row["eval/pairs"] == len(pairs)
    assert row["eval/reward/preferred"] == pytest.approx(mean(p for p, _ in pairs), abs=1e-4)
    assert row["eval/reward/other"] == pytest.approx(mean(o for _, o in pairs), abs=1e-4)
    assert row["eval/accuracy"] == pytest.approx(mean(p > o for p, o in pairs))


def test_a_reward_models_folder_can_be_trained_on(data, one):
    from learner import families

    family = families.read(one["reward"].model, "score")
    assert family.has_score
    with pytest.raises(ValueError, match="LlamaForSequenceClassification is not supported"):
        families.read(one["reward"].model)


def test_dpo_raises_margin_and_accuracy_over_the_reference(one):
    rows = one["learned-dpo"].rows
    first, last = rows[0], rows[-1]
    assert (first["eval/accuracy"], first["eval/margin"]) == (0.5, 0)
    assert last["eval/accuracy"] > 0.9
    assert last["eval/margin"] > 0.5
    assert last["eval/loss"] < first["eval/loss"]


def test_the_dpo_loss_is_hugging_faces(data, one):
    policy = AutoModelForCausalLM.from_pretrained(one["dpo"].model)
    reference = AutoModelForCausalLM.from_pretrained(data / "model")

    def reward(prompt, response):
        return BETA * (hf_logprob(policy, prompt, response) - hf_logprob(reference, prompt, response))

    pairs = held_out_pairs(data, reward)
    row = one["dpo"].rows[-1]
    assert row["eval/margin"] == pytest.approx(mean(p - o for p, o in pairs), rel=1e-3)
    assert row["eval/accuracy"] == pytest.approx(mean(p > o for p, o in pairs))


def test_what_teaches_nothing_is_counted(one):
    rows = one["learned-reward"].rows
    assert sum(r["left_out/no_pair"] for r in rows) >= 1
    assert sum(r["left_out/too_long"] for r in rows) >= 1
    assert all(r["examples"] + r["left_out/no_pair"] + r["left_out/too_long"] == 8 for r in rows[1:])


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "reward-pipeline", "lora", "lora-pipeline"])
def test_every_layout_gives_the_same_numbers(one, two, name):
    expected, found = one[name.split("-")[0]], two[name]
    assert len(found.rows) == len(expected.rows) == 5
    for a, b in zip(found.rows, expected.rows, strict=True):
        assert a.keys() == b.keys()
        for key in (k for k in COMPARED if k in b):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-4), (a["step"], key)
    tensors = load_file(expected.model / "model.safetensors")
    trained = load_file(found.model / "model.safetensors")
    assert trained.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.allclose(trained[key], tensor, rtol=1e-3, atol=1e-4), key


def test_adapters_are_what_a_stage_trains_keeps_and_converts(data, one, tmp_path):
    """What they do not reach stays as it was, to the bit; alone and fused they are the same."""
    run = one["lora"]
    found, base = load_file(run.model / "model.safetensors"), load_file(data / "model/model.safetensors")
    alone = load_file(run.folder / "run/adapter/adapter_model.safetensors")
    for name, weight in base.items():
        path = "base_model.model." + name.removesuffix(".weight")
        a, b = (alone.get(f"{path}.lora_{which}.weight") for which in "AB")
        assert (a is not None) == (name.split(".")[-2] in LORA["modules"])
        if a is None or b is None:
            assert torch.equal(found[name], weight), name
        else:
            assert not torch.equal(found[name], weight), name
            torch.testing.assert_close(found[name], weight + 4 * b @ a, rtol=1e-5, atol=1e-6, msg=name)
    conversion.megatron_to_hf(run.folder / "run/checkpoints/step-000004", tmp_path / "hf")
    for name, tensor in load_file(tmp_path / "hf/model.safetensors").items():
        torch.testing.assert_close(tensor, found[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_reward_models_checkpoint_converts_to_what_was_exported(one, tmp_path):
    run = one["reward"]
    conversion.megatron_to_hf(run.folder / "run/checkpoints/step-000004", tmp_path / "hf")
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", run.model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "hf/config.json").read_text() == (run.model / "config.json").read_text()


def test_a_killed_stage_goes_on_exactly(one):
    assert [r["step"] for r in one["killed"].rows] == [0, 1, 2, 3]
    assert "resumed from" in one["resumed"].log
    for a, b in zip(one["resumed"].rows, one["dpo"].rows, strict=True):
        for key in ("step", "loss", "grad_norm", "margin", "eval/loss", "lr", "tokens"):
            assert a.get(key) == b.get(key), (a["step"], key)
    for folder in ("model", "ema_model"):
        files = (one[n].folder / "run" / folder / "model.safetensors" for n in ("dpo", "resumed"))
        whole, resumed = map(load_file, files)
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_stage_that_measures_from_its_start_does_not_go_on_from_other_weights(one, tmp_path):
    experiment = load(one["dpo"].job()["config"], [], OfflineExperiment)
    assert check_checkpoint(experiment) > 0
    other = tmp_path / "other"
    shutil.copytree(experiment.model.path, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    moved = experiment.model_copy(update={"model": experiment.model.model_copy(update={"path": str(other)})})
    with pytest.raises(ValueError, match=f"started from other weights than {other} has now"):
        check_checkpoint(moved)
