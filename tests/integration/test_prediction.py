"""`slipstream generate` and `slipstream evaluate` on the real vLLM."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SLIPSTREAM = str(Path(sys.executable).parent / "slipstream")
ENGINE = {"kv_cache_gib": 0.25, "max_num_seqs": 64}


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def greedy_tokens(model, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.mark.long
def test_generation_goes_on_where_it_was_interrupted_and_is_the_models_own(make_experiment, made_model):
    folder = make_experiment("generate")
    (folder / "shape.py").write_text("def read(row):\n    return {'prompt': row['words']}\n")
    rows = [{"words": f"t{3 + i % 50} t{4 + i // 50}", "number": i} for i in range(600)]
    (folder / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = folder / "out" / "answers.jsonl"
    command = [SLIPSTREAM, "generate", "experiment.yaml", "many.jsonl", str(output), "--temperature", "0"]
    command += ["--adapter", "shape:read"]

    def interrupted(number: signal.Signals, at_line: int) -> tuple[int, str, str]:
        """Exit code, what was told, and what was written."""
        run = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        while not output.exists() or output.read_bytes().count(b"\n") < at_line:
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.01)
        run.send_signal(number)
        _, told = run.communicate(timeout=60)
        return run.returncode, told, output.read_text()

    code, told, first = interrupted(signal.SIGINT, 20)
    assert code == 130, told
    assert "the same command goes on from there" in told
    assert 20 <= first.count("\n") < 200
    code, told, done = interrupted(signal.SIGKILL, 200)
    assert code == -signal.SIGKILL, told
    assert done.startswith(first)
    assert 200 <= done.count("\n") < 600
    done = done[: done.rindex("\n") + 1]

    again = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    start, *rows_told = again.stderr.splitlines()
    assert start.startswith("generating: the engine starts")
    # On a busy machine the engine may take longer to start than a terminal is left without a word.
    rows_told = [line for line in rows_told if not line.startswith("generating: no row is done yet, ")]
    assert all(line.startswith("generating: row") for line in rows_told)
    assert re.search(r"generating: row 600 of 600, \d+\.\d completions/s$", rows_told[-1])
    assert "vllm" in output.with_suffix(".log").read_text(), "pages of it, and not on the terminal"
    assert "600 rows" in again.stdout
    assert output.read_text().startswith(done), "what was written is not made again"
    lines = lines_of(output)
    assert [line["number"] for line in lines] == [line["row"]["number"] for line in lines] == list(range(600))
    model = AutoModelForCausalLM.from_pretrained(made_model)
    for line in lines[::60]:
        prompt = [int(word[1:]) for word in line["row"]["prompt"].split()]
        expected = greedy_tokens(model, prompt, 12)
        (completion,) = line["completions"]
        assert completion["tokens"] == len(expected)
        assert completion["text"].split() == [f"t{i}" for i in expected if i > 2]

    other = subprocess.run([*command, "model.max_length=48"], cwd=folder, capture_output=True, text=True)
    assert other.returncode == 2
    assert "holds lines made with other settings" in other.stderr
    assert len(other.stderr.splitlines()) == 1


def test_evaluation_keeps_samples_and_tells_the_score_of_a_sum(make_experiment, made_reward_model):
    helpful = {"model": str(made_reward_model), "dtype": "float32", "weight": -0.1, "engine": ENGINE}
    rollout = {
        "sampling": {"max_tokens": 12},
        "engine": ENGINE,
        "rewards": {"even": {"function": "my_reward:share_of_even_words"}, "helpful": helpful},
    }
    folder = make_experiment("evaluate", rollout=rollout, eval={"samples": 4, "target": 9})
    run = subprocess.run(
        [SLIPSTREAM, "evaluate", "experiment.yaml"], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    assert "target 9 NOT reached" in run.stdout
    results = json.loads((folder / "run/evaluation/results.json").read_text())
    samples = lines_of(folder / "run/evaluation/samples.jsonl")
    rewards = [c["reward"] for line in samples for c in line["completions"]]
    assert results["prompts"] == len(samples) == 40
    assert results["completions"] == len(rewards) == 160
    assert results["score"] == pytest.approx(sum(rewards) / len(rewards))
    assert 0.3 < results["parts"]["even"] < 0.7, "an untrained model's words are even half of the time"
    assert not [name for name in results if name.startswith("pass@")], "a model's mark is not right or wrong"
    judge = AutoModelForSequenceClassification.from_pretrained(made_reward_model, dtype=torch.float32)
    compared = 0
    for line in samples:
        for completion in line["completions"]:
            parts = completion["reward_parts"]
            assert completion["reward"] == pytest.approx(parts["even"] - 0.1 * parts["helpful"])
            ids = [int(word[1:]) for word in f"{line['row']['prompt']} {completion['text']}".split()]
            ids += [2] * (completion["finish_reason"] == "stop")
            if len(ids) == line["prompt_tokens"] + completion["tokens"]:  # no special token within
                with torch.no_grad():
                    expected = float(judge(torch.tensor([ids])).logits)
                assert parts["helpful"] == pytest.approx(expected, abs=1e-4)
                compared += 1
    assert compared > 80


@pytest.mark.long
def test_a_start_that_fails_tells_the_engines_own_reason_in_its_one_line(make_experiment):
    """So little memory for the cache that vLLM's core process, and not this one, ends with the reason."""
    folder = make_experiment("fails")
    command = [
        SLIPSTREAM, "generate", "experiment.yaml", "prompts.jsonl", "out.jsonl",
        "rollout.engine.kv_cache_gib=0.00001",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 2
    start, line = run.stderr.splitlines()
    assert start == "generating: the engine starts, which takes half a minute or so"
    assert "vLLM does not start with" in line
    assert "ValueError: No available memory for the cache blocks" in line
    assert "root cause" not in line
