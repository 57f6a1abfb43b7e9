"""Whatever would have another distribution sampled than is trained is refused with the reason."""

import pytest
import yaml

from buffer.experiment import ConfigError, load
from rollout.config import OTHER_POLICY, RolloutExperiment

BASE = {
    "name": "x",
    "run_dir": "r",
    "model": {"path": "m"},
    "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
}


def refusal(tmp_path, sampling) -> str:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "rollout": {"sampling": sampling}}))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "c.yaml", [], RolloutExperiment)
    return str(caught.value)


@pytest.mark.parametrize("key", OTHER_POLICY)
def test_what_moves_probabilities_is_refused_with_the_reason(tmp_path, key):
    text = refusal(tmp_path, {key: 1, "temperature": 0.7})
    assert f"rollout.sampling: with {key} the engine would sample from another distribution" in text
    assert "\n" not in text


def test_what_is_only_misspelt_is_still_an_unknown_key(tmp_path):
    assert "rollout.sampling.temprature: unknown key; did you mean temperature?" in refusal(
        tmp_path, {"temprature": 1}
    )
