"""Which rows a step takes, what is left out of them, and where a resumed feed goes on."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from buffer.examples import Example
from buffer.experiment import DataConfig
from buffer.rendering import PromptRefused
from buffer.stream import open_stream
from learner import parallel
from learner.offline.config import RewardConfig
from learner.offline.encoding import Encoded
from learner.offline.feed import ExampleFeed, share, some
from learner.offline.loop import resume
from learner.offline.stages import make_stage

STAGE = make_stage(RewardConfig(kind="reward"))


class Letters:
    """Stands in for the encoder: a token a letter, `x` does not fit, `!` is a row of chat messages."""

    def renders(self, example: Example) -> bool:
        return "!" not in example.prompt

    def encode(self, example: Example) -> Encoded:
        if "x" in example.prompt:
            raise PromptRefused("too_long", "x")
        if "!" in example.prompt:
            raise PromptRefused("bad_row", "!")
        ids = [np.array([ord(c) for c in text], np.int32) for text in (example.prompt, *example.responses)]
        return Encoded(ids[0], tuple(ids[1:]), example.scores, cut=example.prompt == "c")


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank, size):
        monkeypatch.setattr(parallel, "dp_rank", lambda: rank)
        monkeypatch.setattr(parallel, "dp_size", lambda: size)

    become(0, 1)
    return become


def rows(prompts):
    return [Example(p, ("a", "b"), (0.5, 0.5) if p == "t" else (0.7, 0.3), {}) for p in prompts]


def prompts(found):
    return "".join(chr(e.prompt[0]) for e in found.examples)


def test_what_teaches_nothing_is_left_out_and_counted_by_rule(as_rank):
    found = share(rows("axtbc"), Letters(), STAGE)
    assert prompts(found) == "abc"
    assert dict(found.counts) == {"too_long": 1, "no_pair": 1, "cut": 1}


def test_every_rank_takes_its_own_rows_of_the_same_step(as_rank):
    taken = []
    for rank in range(3):
        as_rank(rank, 3)
        taken.append(prompts(share(rows("abcdefg"), Letters(), STAGE)))
    assert taken == ["adg", "be", "cf"]


def feed(tmp_path, epochs=None, letters="abcdefg"):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(f'{{"prompt": "{p}", "response": ["a", "b"], "score": [1, 0]}}\n' for p in letters)
    )
    data = DataConfig.model_validate({"train": {"kind": "jsonl", "path": str(path)}, "epochs": epochs})
    return ExampleFeed(open_stream(data, 1, "reward"), Letters(), STAGE, 3, epochs)


def test_the_last_epoch_ends_the_data_and_says_so(as_rank, tmp_path):
    ends = feed(tmp_path, epochs=2)
    assert ends.steps() == 5
    taken = []
    while not ends.used_up:
        taken.append(prompts(ends.next()))
    assert [len(t) for t in taken] == [3, 3, 3, 3, 2]
    assert sorted("".join(taken)) == sorted("abcdefg" * 2)
    assert feed(tmp_path).steps() is None
    assert not feed(tmp_path).used_up


def test_more_epochs_have_steps_for_every_row_behind_a_last_one_that_was_short(as_rank, tmp_path):
    once = feed(tmp_path, epochs=1)
    while not once.used_up:
        once.next()
    twice = feed(tmp_path, epochs=2)
    twice.seek(once.position)
    assert twice.steps(3) == 6
    taken = [len(prompts(twice.next())) for _ in range(3)]
    assert taken == [3, 3, 1]
    assert twice.used_up
    assert twice.steps(6) == 6


def test_skipped_rows_do_not_change_how_many_steps_are_planned(as_rank, tmp_path):
    """The learning rate's schedule goes by them: a run that was stopped goes on by the same."""
    path = tmp_path / "rows.jsonl"
    good = '{"prompt": "a", "response": ["a", "b"], "score": [1, 0]}\n'
    path.write_text(good + "not JSON\n" * 4 + good * 7)
    train = {"kind": "jsonl", "path": str(path)}
    data = DataConfig.model_validate({"train": train, "epochs": 1, "on_bad_row": "skip", "shuffle": False})
    rows_left_out = ExampleFeed(open_stream(data, 1, "reward"), Letters(), STAGE, 3, 1)
    assert rows_left_out.steps() == 4
    rows_left_out.next()
    assert rows_left_out.position["counts"] == {"bad_row": 4}
    assert rows_left_out.steps(1) == 4


def test_rows_that_cannot_be_read_are_counted_once_over_all_ranks(as_rank, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = ['{"prompt": "a", "response": ["a", "b"], "score": [1, 0]}', "not JSON"] * 3
    path.write_text("\n".join(lines))
    settings = {
        "train": {"kind": "jsonl", "path": str(path)},
        "epochs": 1,
        "on_bad_row": "skip",
        "shuffle": False,
    }
    data = DataConfig.model_validate(settings)
    counted = 0
    for rank in range(2):
        as_rank(rank, 2)
        of = ExampleFeed(open_stream(data, 1, "reward"), Letters(), STAGE, 2, 1)
        counted += sum(of.next().counts["bad_row"] for _ in range(2))
    assert counted == 3


def test_so_many_responses_of_a_row_are_drawn_anew_each_time_and_the_same_again_after_a_resume(
    as_rank, tmp_path
):
    path = tmp_path / "rows.jsonl"
    few = {"prompt": "f", "response": ["a", "b"], "score": [1, 0]}
    many = {"prompt": "m", "response": list("abcde"), "score": [5, 4, 3, 2, 1]}
    path.write_text(f"{json.dumps(few)}\n{json.dumps(many)}\n")
    data = DataConfig.model_validate({"train": {"kind": "jsonl", "path": str(path)}, "shuffle": False})

    def made(seed=1):
        return ExampleFeed(open_stream(data, 1, "reward"), Letters(), STAGE, 2, None, 3, seed=seed)

    def drawn(of, count):
        for _ in range(count):
            whole, some = of.next().examples
            assert whole.scores == (1, 0)
            letters = "".join(chr(r[0]) for r in some.responses)
            assert [5 - "abcde".index(letter) for letter in letters] == list(some.scores)
            yield letters

    first = made()
    letters = list(drawn(first, 20))
    assert {len(drawn) for drawn in letters} == {3}
    assert len(set(letters)) > 5
    assert set("".join(letters)) == set("abcde")
    again = made()
    assert list(drawn(again, 12)) == letters[:12]
    resumed = made()
    resumed.seek(again.position)
    assert list(drawn(resumed, 8)) == letters[12:]
    assert list(drawn(made(seed=2), 20)) != letters


@pytest.mark.parametrize(
    ("select", "letters", "scores"), [("first", "abc", (1, 4, 0)), ("best", "bde", (4, 2, 4))]
)
def test_the_first_or_the_best_responses_are_taken_in_their_order_whatever_the_seed(select, letters, scores):
    example = Example("p", tuple("abcde"), (1, 4, 0, 2, 4), {})
    for seed in "xyz":
        taken = some(example, 3, select, seed)
        assert "".join(taken.responses) == letters
        assert taken.scores == scores
    assert some(example, 5, select, "x") is example
    tied = Example("p", tuple("abc"), (1, 1, 1), {})
    assert some(tied, 2, select, "x").responses == ("a", "b")


def test_a_choice_among_all_responses_is_refused():
    with pytest.raises(ValueError, match=r"select=best would do nothing.*set responses to how many"):
        RewardConfig.model_validate({"kind": "reward", "select": "best"})


def test_a_place_in_the_data_is_found_again(as_rank, tmp_path):
    first, again = feed(tmp_path), feed(tmp_path)
    first.next()
    again.seek(first.position)
    assert [prompts(first.next()) for _ in range(4)] == [prompts(again.next()) for _ in range(4)]


def test_a_place_of_another_tokenizer_is_refused(as_rank, tmp_path):
    first, again = feed(tmp_path), feed(tmp_path)
    first.next()
    trainable = SimpleNamespace(updates=SimpleNamespace(made=0))
    place = first.position | {"updates": 7, "tokenizer": "abc"}
    with pytest.raises(ValueError, match="the chat template in it is not what this run began with"):
        resume(again, trainable, place, "abd")
    resume(again, trainable, place, "abc")
    assert trainable.updates.made == 7
    assert prompts(first.next()) == prompts(again.next())
    resume(feed(tmp_path), trainable, first.position, "abc")  # one of before it was kept


def test_the_first_row_is_looked_at_and_not_taken(as_rank, tmp_path):
    looked, other = feed(tmp_path), feed(tmp_path)
    looked.check_first()
    assert [prompts(looked.next()) for _ in range(3)] == [prompts(other.next()) for _ in range(3)]
    feed(tmp_path, letters="x").check_first()  # one row that does not fit says nothing of the others
    with pytest.raises(ValueError, match="the first row has chat messages, and the tokenizer has no chat"):
        feed(tmp_path, letters="!!").check_first()
    later = feed(tmp_path, letters="abcdefg!")
    later.check_first()
    found = [later.next() for _ in range(8)]
    assert sum(share.counts["bad_row"] for share in found) >= 1, "one among others costs itself only"
