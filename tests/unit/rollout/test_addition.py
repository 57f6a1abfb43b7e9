from rollout.rewards import exact_number
from rollout.tasks import addition


def pairs(rows):
    return {(row["metadata"]["a"], row["metadata"]["b"]) for row in rows}


def test_train_and_heldout_share_no_pair_and_cover_all():
    train, heldout = pairs(addition.train(3)), pairs(addition.heldout(3))
    assert not train & heldout
    assert not train & {(b, a) for a, b in heldout}, "the other order tells the sum"
    assert train | heldout == {(a, b) for a in range(1, 10) for b in range(1, 10)}
    assert len(addition.train(3)) == 65
    assert len(addition.heldout(3)) == 16


def test_the_seed_alone_decides_the_split():
    assert addition.train(3) == addition.train(3)
    assert pairs(addition.heldout(3)) != pairs(addition.heldout(4))


def test_every_answer_is_right():
    for row in addition.train() + addition.heldout():
        total = row["metadata"]["a"] + row["metadata"]["b"]
        assert exact_number(f"It is {total}.", row) == 1
        assert exact_number(f"It is {total + 1}.", row) == 0


def test_answers_and_comparisons_are_of_the_same_parts():
    for part, rows in (("train", addition.train()), ("heldout", addition.heldout())):
        for row, answered, compared in zip(
            rows, addition.answered(part), addition.compared(part), strict=True
        ):
            assert row["prompt"] == answered["prompt"] == compared["prompt"]
            assert exact_number(answered["response"], row) == 1
            right = [exact_number(response, row) for response in compared["response"]]
            assert right == [float(score == 0) for score in compared["score"]]


def test_phrasings_are_all_right_and_the_liked_order_is_right_first_then_the_equation():
    for part, rows in (("train", addition.train()), ("heldout", addition.heldout())):
        phrased = iter(addition.phrased(part))
        for row, liked in zip(rows, addition.liked(part), strict=True):
            said = [next(phrased) for _ in addition.PHRASINGS]
            assert {s["prompt"] for s in said} == {row["prompt"], liked["prompt"]} == {row["prompt"]}
            assert len({s["response"] for s in said}) == 3
            assert all(exact_number(s["response"], row) == 1 for s in said)
            expected = [2 * exact_number(text, row) + ("=" in text) for text in liked["response"]]
            assert liked["score"] == expected
            assert sorted(expected) == [0, 0, 1, 2, 2, 3]
        assert next(phrased, None) is None
