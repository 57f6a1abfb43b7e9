import json

import pytest

from buffer.bounds import Bounds, bounds_of
from buffer.errors import BadMessage
from buffer.experiment import ModelConfig
from buffer.records import Lease, Prompt

LEASE = Lease("l", Prompt("0/1", {"prompt": "p"}), "train", 3)


def test_a_group_that_the_model_cannot_take_is_named(group):
    made = group(LEASE)  # the second trajectory's tokens are 1 to 7
    Bounds().check(made)
    Bounds(7, 8).check(made)
    with pytest.raises(BadMessage, match=r"trajectories\[0\]: 7 tokens; model.max_length is 6"):
        Bounds(6, 8).check(made)
    with pytest.raises(BadMessage, match=r"trajectories\[1\].token_ids: expected 0 to 6, .* got 7"):
        Bounds(7, 7).check(made)


@pytest.mark.parametrize(
    ("config", "vocabulary"),
    [
        ({"vocab_size": 50}, 50),
        ({"vocab_size": True}, None),
        ({"vocab_size": -1}, None),
        ({"vocab_size": "many"}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
    ids=str,
)
def test_bounds_come_from_the_models_folder_where_there_is_one(tmp_path, config, vocabulary):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(path=str(tmp_path), max_length=64, dtype="float32")
    assert bounds_of(model) == Bounds(64, vocabulary)
    assert bounds_of(None) == Bounds()
