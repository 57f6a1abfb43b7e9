"""Which folders a scorer serves, which tokenizers are the same, and how text is laid out."""

import copy
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from buffer.experiment import ConfigError, ModelConfig
from buffer.rendering import PromptRefused
from rollout.config import RolloutConfig
from rollout.scorer.folder import faults, model_reward
from rollout.scorer.rendering import WordsRenderer, fingerprint
from rollout.scorer.wire import Words

GOOD = {
    "architectures": ["LlamaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "max_position_embeddings": 128,
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}answer"


def tokenizer(template=TEMPLATE, **changes):
    words = ["<eos>", "<pad>", "system", "user", "answer", "how", "so", "be", "kind"]
    vocabulary = {word: i for i, word in enumerate(words)} | changes
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "holds LlamaForCausalLM; a reward model is a …For"),
        ({"architectures": None}, "holds nothing"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "has 3 labels; a reward model has one"),
        ({"id2label": ...}, "has 2 labels"),
        ({"max_position_embeddings": 32}, "takes at most 32 tokens, and is to score up to 64"),
    ],
)
def test_a_folder_that_cannot_serve_is_told_why(tmp_path, changes, told):
    config = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (line,) = faults("rollout.rewards.x.model", str(tmp_path), 64)
    assert line.startswith(f"rollout.rewards.x.model={tmp_path}: ")
    assert told in line


def test_a_good_folder_has_no_faults_and_a_missing_or_broken_one_has(tmp_path):
    (line,) = faults("key", str(tmp_path), 64)
    assert "no config.json in it" in line
    (tmp_path / "config.json").write_text("{")
    (line,) = faults("key", str(tmp_path), 64)
    assert "is not JSON" in line
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    assert faults("key", str(tmp_path), 128) == []


def test_a_name_that_no_reward_model_has_is_told_with_those_there_are(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    rollout = RolloutConfig.model_validate(
        {"rewards": {"right": {"function": "a:b"}, "helpful": {"model": str(tmp_path), "max_length": 64}}}
    )
    policy = ModelConfig(path="/policy", max_length=512)
    assert model_reward(rollout, policy, "helpful").model == str(tmp_path)
    for name in ("right", "other"):
        with pytest.raises(ConfigError, match=rf"--name {name}: no reward model .* there: helpful"):
            model_reward(rollout, policy, name)


def test_a_scorer_with_pipeline_stages_needs_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    engine = {"pipeline_parallel": 2}
    reward = {"model": str(tmp_path), "max_length": 64, "engine": engine}
    rollout = RolloutConfig.model_validate({"rewards": {"helpful": reward}})
    policy = ModelConfig(path="/policy", max_length=512)
    monkeypatch.setattr("rollout.config.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"rewards.helpful.engine.pipeline_parallel=2: this machine has"):
        model_reward(rollout, policy, "helpful")
    monkeypatch.setattr("rollout.config.has_gpu", lambda: True)
    assert model_reward(rollout, policy, "helpful").engine.pipeline_parallel == 2


def test_the_same_tokenizer_has_the_same_fingerprint_after_use_and_saving(tmp_path):
    ours = tokenizer()
    before = fingerprint(ours)
    ours(["how so", "so"], padding=True, truncation=True, max_length=2)
    assert fingerprint(ours) == before
    ours.save_pretrained(tmp_path)
    assert fingerprint(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "chat_template", TEMPLATE + " "),
        lambda t: setattr(t, "eos_token", "kind"),
        lambda t: t.add_tokens(["new"]),
        lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace()),
    ],
)
def test_another_template_end_mark_word_or_splitting_is_another_fingerprint(change):
    other = copy.deepcopy(tokenizer())
    change(other)
    assert fingerprint(other) != fingerprint(tokenizer())


def test_exchanged_ids_are_another_fingerprint():
    assert fingerprint(tokenizer(how=6, so=5)) != fingerprint(tokenizer())


def test_text_is_laid_out_as_prompt_response_and_end_mark():
    ours = tokenizer()
    renderer = WordsRenderer(ours, 16, "be kind")
    ids = renderer.render(Words("how", "so so", ended=True))
    assert ours.convert_ids_to_tokens(ids) == [
        "system", "be", "kind", "user", "how", "answer", "so", "so", "<eos>",
    ]  # fmt: skip
    cut = renderer.render(Words([{"role": "user", "content": "how"}], "so so", ended=False))
    assert cut == ids[:-1], "an answer that was not ended is scored at its last token"


def test_text_longer_than_the_model_takes_is_refused():
    renderer = WordsRenderer(tokenizer(), 6, None)
    assert len(renderer.render(Words("how", "so so", ended=True))) == 6
    with pytest.raises(PromptRefused, match="too_long: 7 tokens; the scorer takes 6"):
        renderer.render(Words("how", "so so so", ended=True))
