import pytest

from rollout import rewards

GSM8K = "She sold 48/2 = <<48/2=24>>24 in May.\nShe sold 48+24 = <<48+24=72>>72 in all.\n#### 72"


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("4 + 3 = 7", "7", 1),
        ("The answer is 7.", 7, 1),
        ("7 is what you get from 4 + 3", "7", 0),
        ("no idea", "7", 0),
        ("", "7", 0),
        ("it is -7", "7", 0),
        ("it is -7", "-7", 1),
        ("1,234", "1234", 1),
        ("12.0", "12", 1),
        ("17", "7", 0),
        ("half of 48 is 24, so 72 in all", GSM8K, 1),
        ("#### 24", GSM8K, 0),
    ],
)
def test_exact_number_reads_the_last_number(text, answer, expected):
    assert rewards.exact_number(text, {"answer": answer}) == expected


def test_an_answer_without_a_number_is_told():
    with pytest.raises(ValueError, match="'Paris' has no number"):
        rewards.exact_number("7", {"answer": "Paris"})


def test_contains_ignores_case():
    assert rewards.contains("I say PARIS, France", {"answer": "Paris"}) == 1
    assert rewards.contains("London", {"answer": "Paris"}) == 0


def test_math_verify_compares_values_not_texts(caplog):
    row = {"answer": r"$\frac{1}{2}$"}
    assert rewards.math_verify("so it is $0.5$", row) == 1
    assert rewards.math_verify(r"so it is $\frac{2}{4}$", row) == 1
    assert rewards.math_verify("so it is $2$", row) == 0
    assert rewards.math_verify("so it is $72$", {"answer": GSM8K}) == 1
    assert rewards.math_verify("so it is $24$", {"answer": GSM8K}) == 0
    assert not caplog.records, "a line for every completion would fill the log"


def test_reasoning_gym_scores_with_the_rows_own_dataset():
    from reasoning_gym import create_dataset

    entry = create_dataset("chain_sum", size=1, seed=5)[0]
    row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
    assert rewards.reasoning_gym(f"I think <answer>{entry['answer']}</answer>", row) == 1
    assert rewards.reasoning_gym(entry["answer"], row) == 1
    assert rewards.reasoning_gym("<answer>nonsense</answer>", row) < 1
