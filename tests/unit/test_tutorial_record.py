"""What the tutorial promises, held against the recorded run that it quotes."""

import json
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
PAGE = (HOME / "docs/tutorial.md").read_text()


@pytest.fixture(scope="module")
def record():
    return json.loads((HOME / "benchmarks/results/tutorial.json").read_text())


def test_reinforcement_raises_the_reward_models_held_out_score_over_sft(record):
    before, after = record["rl"]["before"], record["rl"]["after"]
    gain = after["reward_model"] - before["reward_model"]
    assert gain > 3 * (before["reward_model_stderr"] ** 2 + after["reward_model_stderr"] ** 2) ** 0.5


def test_it_takes_less_than_half_an_hour(record):
    assert record["seconds"] < 30 * 60


def test_the_table_of_the_page_is_the_record(record):
    sft, reward, rl = record["sft"], record["reward"], record["rl"]
    assert f"| loss | {sft['before']:.2f} | {sft['after']:.2f} |" in PAGE
    assert f"| {reward['before']:.0%} | {reward['after']:.0%} |".replace("%", " %") in PAGE
    score = " | ".join(
        f"{x['reward_model']:.2f} ± {x['reward_model_stderr']:.2f}" for x in (rl["before"], rl["after"])
    )
    assert f"| the reward model's score | {score} |" in PAGE


def test_the_kinds_of_answers_of_the_page_are_the_records(record):
    def cells(answers):
        return f"{answers['count']} | {answers['mean_score']:.2f}" if answers else "0 |"

    before, after = (record["rl"][when]["answers"] for when in ("before", "after"))
    for kind in sorted(before | after):
        named = kind.replace("other", "something else").replace("equation", "the equation")
        assert f"| {named} | {cells(before.get(kind))} | {cells(after.get(kind))} |" in PAGE
