import pytest

from rollout import rewards


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
    ],
)
def test_exact_number_reads_the_last_number(text, answer, expected):
    assert rewards.exact_number(text, {"answer": answer}) == expected


def test_contains_ignores_case():
    assert rewards.contains("I say PARIS, France", {"answer": "Paris"}) == 1
    assert rewards.contains("London", {"answer": "Paris"}) == 0


def test_math_verify_compares_values_not_texts():
    row = {"answer": r"$\frac{1}{2}$"}
    assert rewards.math_verify("so it is $0.5$", row) == 1
    assert rewards.math_verify(r"so it is $\frac{2}{4}$", row) == 1
    assert rewards.math_verify("so it is $2$", row) == 0


def test_reasoning_gym_scores_with_the_rows_own_dataset():
    from reasoning_gym import create_dataset

    entry = create_dataset("chain_sum", size=1, seed=5)[0]
    row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
    assert rewards.reasoning_gym(f"I think <answer>{entry['answer']}</answer>", row) == 1
    assert rewards.reasoning_gym(entry["answer"], row) == 1
    assert rewards.reasoning_gym("<answer>nonsense</answer>", row) < 1
