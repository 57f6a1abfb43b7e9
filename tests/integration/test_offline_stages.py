"""SFT, reward model and DPO on real Megatron: they learn, agree with Hugging Face, resume, in any layout.

Starting a process takes most of the time, so runs share them (`offline_jobs.py`).
"""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from buffer.experiment import load
from launch.resuming import check_checkpoint
from learner import conversion
from learner.offline.config import OfflineExperiment

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("offline_jobs.py")
WORDS = ["<end>", "?", *"abcdefghijklmnop"]
END = 0
PADDING = WORDS.index("?")
LEARNED = {"sft": (120, 1e-2), "reward": (40, 5e-3), "dpo": (25, 2e-3)}
"""Steps and learning rate with which a stage learns its made task."""
BETA = 0.5
LORA = {"rank": 3, "alpha": 12, "modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}
COMPARED = ("loss", "grad_norm", "accuracy", "margin", "eval/loss", "eval/margin", "examples", "tokens")


class Run:
    """One run's folder: what it is to do, and what it did."""

    def __init__(self, folder, data, kind, *, kill_at=None, steps=4, lr=2e-3, layout=None, **learner):
        self.folder, self.kind, self.kill_at = folder, kind, kill_at
        layout = {"tensor": 1, "pipeline": 1, "distributed_optimizer": False, **(layout or {})}
        stage = {"kind": kind} | ({"beta": BETA} if kind == "dpo" else {})
        rows = "taught" if kind == "sft" else "preferences"
        self.experiment = {
            "name": "offline",
            "run_dir": str(folder / "run"),
            "model": {"path": str(data / "model"), "dtype": "float32", "max_length": 32},
            "data": {"train": {"kind": "jsonl", "path": str(data / f"{rows}.jsonl")}},
            "stage": stage,
            "learner": {
                "steps": steps,
                "batch_size": 8,
                "tokens_per_microbatch": 64,
                "threads": 1,
                "processes": layout["tensor"] * layout["pipeline"],
                "parallel": layout,
                "optimizer": {"lr": lr, "schedule": "cosine", "warmup_steps": 2},
                "checkpoint": {"every": 2, "keep": 2},
                **({"ema": {"decay": 0.5}} if kind == "dpo" else {}),
                **learner,
            },
            "eval": {"source": {"kind": "jsonl", "path": str(data / f"{rows}-held-out.jsonl")}},
            "logging": {"tensorboard": False},
        }

    def job(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.yaml"
        config.write_text(yaml.safe_dump(self.experiment))
        return {"config": str(config), "log": str(self.folder / "log"), "kill_at": self.kill_at}

    @property
    def rows(self):
        return [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]

    @property
    def log(self):
        return (self.folder / "log-0.txt").read_text()

    @property
    def model(self):
        return self.folder / "run" / "model"


def train(ranks, runs, killed=False):
    """Make the runs one after the other in one start of so many processes."""
    jobs = runs[0].folder.with_name(f"jobs-{runs[0].folder.name}.json")
    jobs.parent.mkdir(parents=True, exist_ok=True)
    jobs.write_text(json.dumps([run.job() for run in runs]))
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*start, str(PROGRAM), str(jobs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode != 0) == killed, done.stdout[-6000:]


def answer(prompt):
    """What SFT teaches: two words that name the prompt's last letter."""
    return {"a": "e i", "b": "f j", "c": "g k", "d": "h l"}[prompt[-1]]


def preference(chance):
    """A prompt with three responses, the better the more often its first letter comes; scores below 1."""
    prompt = " ".join(chance.choices(WORDS[6:], k=3))
    responses = [" ".join(chance.choices(WORDS[2:6], k=chance.randint(3, 6))) for _ in range(3)]
    return {"prompt": prompt, "response": responses, "score": [r.count("a") / 10 for r in responses]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A made Llama with its tokenizer, and rows to teach it."""
    folder = tmp_path_factory.mktemp("offline")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder / "model")
    chance = random.Random(0)
    prompts = [f"{a} {b}" for a, b in itertools.permutations("abcd", 2)]
    taught = [{"prompt": p, "response": answer(p)} for p in prompts]
    write(folder / "taught.jsonl", taught)
    write(folder / "taught-held-out.jsonl", taught[:5])
    tied = {"prompt": "e f", "response": ["a b", "c d"], "score": [0.5, 0.5]}
    long = {"prompt": "e " * 20, "response": ["a " * 20, "b"], "score": [1, 0]}
    write(folder / "preferences.jsonl", [*(preference(chance) for _ in range(160)), tied, long])
    write(folder / "preferences-held-out.jsonl", [preference(chance) for _ in range(40)])
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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


def test_the_command_tells_a_bad_row_by_its_place_and_once_mended_trains_to_a_report(data, tmp_path):
    run = Run(tmp_path / "command", data, "reward", steps=2)
    rows = tmp_path / "rows.jsonl"
    run.experiment["data"]["train"]["path"] = str(rows)
    good = {"prompt": "a", "response": ["b", "c"], "score": [1, 0]}
    command = [str(Path(sys.executable).with_name("slipstream")), "reward", run.job()["config"]]

    def slipstream():
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    write(rows, [good, good | {"score": ["x", 0]}])
    bad = slipstream()
    assert bad.returncode == 1, bad.stdout
    assert "rows.jsonl:2" in bad.stdout
    assert "Traceback" not in bad.stdout
    write(rows, [good] * 8)
    done = slipstream()
    assert done.returncode == 0, done.stdout
    assert "step 2 of 2: loss" in done.stdout
    assert (run.folder / "run/report/loss.png").exists()
    assert not (run.folder / "run/samples.jsonl").exists(), "it made no completions"
    assert slipstream().stdout.startswith("offline (reward)"), "finished: nothing is trained again"


def test_a_stage_whose_rows_teach_nothing_is_no_success(data, tmp_path):
    run = Run(tmp_path / "tied", data, "reward", steps=2)
    rows = tmp_path / "rows.jsonl"
    run.experiment["data"]["train"]["path"] = str(rows)
    write(rows, [{"prompt": "a", "response": ["b", "c"], "score": [1, 1]}] * 8)
    command = [str(Path(sys.executable).with_name("slipstream")), "reward", run.job()["config"]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stdout
    assert "not one of 2 steps changed the weights" in ended.stdout
    assert "Traceback" not in ended.stdout
    assert not (run.folder / "run/model").exists()


def slipstream(run):
    kind = run.experiment["stage"]["kind"]
    command = [str(Path(sys.executable).with_name("slipstream")), kind, run.job()["config"]]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_a_finished_stage_goes_on_for_more_epochs_evaluates_and_exports_when_asked_to_later(data, tmp_path):
    run = Run(tmp_path / "more", data, "sft", steps=None, batch_size=4, checkpoint={"export": False})
    few = tmp_path / "few.jsonl"
    write(few, read(data / "taught.jsonl")[:10])
    run.experiment["data"] = {"train": {"kind": "jsonl", "path": str(few)}, "epochs": 1}
    run.experiment["eval"] = None
    run.experiment["learner"]["optimizer"] = {"lr": 0.01, "schedule": "linear"}
    assert slipstream(run).returncode == 0
    assert [(r["step"], r["examples"]) for r in run.rows] == [(1, 4), (2, 4), (3, 2)]
    assert not run.model.exists()
    run.experiment["data"]["epochs"] = 2
    done = slipstream(run)
    assert done.returncode == 0, done.stdout
    assert [(r["step"], r["examples"]) for r in run.rows[3:]] == [(4, 4), (5, 4), (6, 2)]
    rates = [r["lr"] for r in run.rows[3:]]
    assert rates == pytest.approx([0.005, 0.01 / 3, 0.005 / 3]), "by all six"
    run.experiment["learner"]["checkpoint"] = {"export": True}
    assert slipstream(run).returncode == 0
    exported = run.model / "model.safetensors"
    made = exported.stat().st_mtime_ns
    run.experiment["eval"] = {"source": {"kind": "jsonl", "path": str(few)}}
    done = slipstream(run)
    assert done.returncode == 0, done.stdout
    assert run.rows[-1]["step"] == 6
    assert run.rows[-1]["examples"] == 2, "what training wrote of it is still there"
    assert run.rows[-1]["eval/loss"] > 0
    again = exported.stat().st_mtime_ns
    assert again > made
    assert slipstream(run).returncode == 0
    assert exported.stat().st_mtime_ns == again, "nothing is left to do"


@pytest.mark.long
@pytest.mark.parametrize(("first", "fails"), [([1, 1], True), ([1, 0], False)])
def test_whether_anything_was_trained_counts_over_stops(data, tmp_path, first, fails):
    """The rows behind the stop teach nothing, those of the first step before it may have."""
    run = Run(tmp_path / "stopped", data, "reward", steps=3, batch_size=4, checkpoint={"every": 1})
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "a", "response": ["b", "c"]}
    write(rows, [row | {"score": first}] * 4 + [row | {"score": [1, 1]}] * 8)
    run.experiment["data"] = {"train": {"kind": "jsonl", "path": str(rows)}, "shuffle": False}
    run.kill_at = 3
    train(1, [run], killed=True)
    ended = slipstream(run)
    assert ended.returncode == int(fails), ended.stdout
    assert ("not one of 3 steps changed the weights" in ended.stdout) == fails
    assert run.model.exists() != fails


def test_a_killed_rank_is_told_in_lines_and_not_by_the_others_traceback(data, tmp_path):
    run = Run(tmp_path / "lost", data, "sft", steps=100_000)
    run.experiment["learner"]["processes"] = 2
    command = [str(Path(sys.executable).with_name("slipstream")), "sft", run.job()["config"]]
    with (tmp_path / "told").open("wb") as told:
        stage = subprocess.Popen(command, stdout=told, stderr=told)
    rows = run.folder / "run/metrics.jsonl"
    while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
        assert stage.poll() is None, (tmp_path / "told").read_text()
        time.sleep(0.1)
    ranks = [
        p for p in psutil.Process(stage.pid).children(recursive=True) if "learner.offline" in p.cmdline()
    ]
    (victim,) = (p for p in ranks if p.environ().get("RANK") == "1")
    victim.kill()
    assert stage.wait(60) == 1
    output = (tmp_path / "told").read_text()
    assert "rank 1 was ended by SIGKILL" in output
    assert "its other ranks are not heard any more" in output
    assert "Traceback" not in output


def test_ranks_that_find_other_rows_than_each_other_train_on_none(data, tmp_path):
    run = Run(tmp_path / "apart", data, "sft")
    run.experiment["learner"]["processes"] = 2
    run.experiment["data"]["train"] = {"kind": "function", "path": "own_functions:rows_of_each_rank"}
    command = [str(Path(sys.executable).with_name("slipstream")), "sft", run.job()["config"]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent)
    assert ended.returncode == 1, ended.stdout
    assert "data.train: not every rank found the same rows" in ended.stdout
    assert "Traceback" not in ended.stdout


def test_a_rank_that_is_told_to_stop_alone_leaves_no_finished_stage(data, tmp_path):
    run = Run(tmp_path / "told", data, "sft", steps=100_000)
    command = [str(Path(sys.executable).with_name("slipstream")), "sft", run.job()["config"]]
    with (tmp_path / "output").open("wb") as output:
        stage = subprocess.Popen(command, stdout=output, stderr=output)
    rows = run.folder / "run/metrics.jsonl"
    while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
        assert stage.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.1)
    (rank,) = (
        p for p in psutil.Process(stage.pid).children(recursive=True) if p.environ().get("RANK") == "0"
    )
    rank.terminate()
    assert stage.wait(60) == 1
    assert "before the stage was finished" in (tmp_path / "output").read_text()
    assert not run.model.exists()
