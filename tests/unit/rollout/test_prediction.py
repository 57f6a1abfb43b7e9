"""Offline prediction over a scripted engine: order, resuming, refused rows, settings."""

import asyncio
import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from buffer.examples import BadRow
from buffer.rendering import PromptRefused
from rollout import offline
from rollout.config import PredictionExperiment
from rollout.engine import CompletionFailed
from rollout.groups import SamplingPlan
from rollout.prediction import Output, Predictor, predict, refused_lines
from rollout.scripted import ScriptedEngine, plain_completion
from rollout.total_reward import Total

ROWS = [{"prompt": f"p{i}", "answer": i} for i in range(9)]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def output(path, **settings):
    return Output(path, {"model": "m"} | settings)


async def upside_down(number, row):
    """The later the row, the sooner it is done."""
    await asyncio.sleep(0.01 * (len(ROWS) - number))
    return {"number": number, "row": row, "completions": []}


def test_lines_are_in_the_rows_order_and_never_more_in_hand_than_the_window(tmp_path):
    in_hand, most = set(), []

    async def make(number, row):
        in_hand.add(number)
        most.append(len(in_hand))
        return await upside_down(number, row)

    def written(number, line):
        in_hand.remove(number)
        assert lines_of(tmp_path / "out.jsonl")[-1] == line

    asyncio.run(predict(ROWS, output(tmp_path / "out.jsonl"), make, 3, written))
    assert [line["number"] for line in lines_of(tmp_path / "out.jsonl")] == list(range(9))
    assert max(most) == 3


def test_a_restart_makes_only_what_is_missing_also_behind_half_a_line(tmp_path):
    path = tmp_path / "out.jsonl"

    async def fails_at_5(number, row):
        if number == 5:
            raise CompletionFailed("engine", "as the test wants")
        return await upside_down(number, row)

    with pytest.raises(CompletionFailed):
        asyncio.run(predict(ROWS, output(path), fails_at_5, 2))
    assert len(lines_of(path)) == 5
    with path.open("a") as file:
        file.write('{"number": 5, "ro')  # as a kill in the middle of a write leaves it
    made = []

    async def make(number, row):
        made.append(number)
        return await upside_down(number, row)

    asyncio.run(predict(ROWS, output(path), make, 2))
    assert made == [5, 6, 7, 8]
    assert [line["number"] for line in lines_of(path)] == list(range(9))


def test_lines_of_other_settings_are_not_continued(tmp_path):
    path = tmp_path / "out.jsonl"
    asyncio.run(predict(ROWS, output(path), upside_down, 2))
    (tmp_path / "own.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"own\.jsonl: it is there and nothing was generated into it"):
        Output(tmp_path / "own.jsonl", {}).begin()
    expected = (
        f'{path}: holds lines made with other settings: model "m" → "another", rewards.right.weight not told '
        '→ 2.0, stop not told → ["."]; bring those back, remove it and out.jsonl.settings.json, or write to '
        "another"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        output(path, model="another", rewards={"right": {"weight": 2.0}}, stop=["."]).begin()
    assert output(path).begin() == len(ROWS)


def test_a_file_is_written_by_one_process_at_a_time(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    with output(path).held():
        assert output(path).begin() == 0
        with pytest.raises(ValueError, match=r"out\.jsonl: another process is writing it"):
            output(path).held().__enter__()
    with output(path).held():
        asyncio.run(predict(ROWS, output(path), upside_down, 2))
    assert len(lines_of(path)) == len(ROWS)


def test_what_is_nobodys_output_has_no_settings_made_beside_it(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text("{}\n")
    with pytest.raises(ValueError, match="nothing was generated into it"), output(own).held():
        output(own).begin()
    assert list(tmp_path.iterdir()) == [own]


def test_settings_that_cannot_be_read_are_told_with_their_file(tmp_path):
    path = tmp_path / "out.jsonl"
    output(path).begin()
    (tmp_path / "out.jsonl.settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"out\.jsonl\.settings\.json: cannot be read: .*remove it"):
        output(path).begin()


def folder_of_weights(path, value, files=2):
    path.mkdir(exist_ok=True)
    for number in range(files):
        save_file({f"w{number}": np.full((3, 5), value, np.float32)}, path / f"{number}.safetensors")
    return str(path)


def test_a_model_trained_again_at_its_place_does_not_go_on_in_the_lines_of_the_one_before(tmp_path):
    policy, judge, unused = (folder_of_weights(tmp_path / name, 1.0) for name in ("policy", "judge", "none"))
    rewards = {
        "right": {"function": "rollout.rewards:exact_number"},
        "helpful": {"model": judge, "dtype": "float32"},
        "idle": {"model": unused, "weight": 0, "dtype": "float32"},
    }
    sections = {"name": "e", "run_dir": str(tmp_path), "model": {"path": policy}}
    experiment = PredictionExperiment.model_validate({**sections, "rollout": {"rewards": rewards}})

    def begin(scored):
        settings = offline.settings_of(experiment, ROWS, SamplingPlan(2, 0.7, 8, 1.0, None), scored)
        return Output(tmp_path / f"{scored}.jsonl", settings).begin()

    assert begin(scored=True) == begin(scored=False) == 0
    folder_of_weights(tmp_path / "policy", 1.0)
    folder_of_weights(tmp_path / "none", 2.0)
    assert begin(scored=True) == begin(scored=False) == 0, "the same bytes, written again; and nobody's score"
    folder_of_weights(tmp_path / "judge", 2.0)
    with pytest.raises(
        ValueError, match=r'other settings: rewards\.helpful\.weights "\w{24}" → "\w{24}"; bring'
    ):
        begin(scored=True)
    assert begin(scored=False) == 0, "what is generated has no score"
    folder_of_weights(tmp_path / "judge", 1.0)
    folder_of_weights(tmp_path / "policy", 1.5)
    for scored in (True, False):
        with pytest.raises(ValueError, match=r'other settings: weights "\w{24}" → "\w{24}"; bring'):
            begin(scored)
    folder_of_weights(tmp_path / "policy", 1.0, files=3)
    with pytest.raises(ValueError, match=r'other settings: weights "'):
        begin(scored=False)


def test_another_template_or_type_does_not_go_on_in_the_lines_of_the_one_before(tmp_path):
    policy, judge = (folder_of_weights(tmp_path / name, 1.0) for name in ("policy", "judge"))
    sections = {"name": "e", "run_dir": str(tmp_path)}
    sections |= {"rollout": {"rewards": {"helpful": {"model": judge, "dtype": "float32"}}}}

    def begin(dtype="float32"):
        model = {"path": policy, "dtype": dtype}
        experiment = PredictionExperiment.model_validate(sections | {"model": model})
        settings = offline.settings_of(experiment, ROWS, SamplingPlan(2, 0.7, 8, 1.0, None), scored=True)
        return Output(tmp_path / "out.jsonl", settings).begin()

    assert begin() == begin() == 0
    with pytest.raises(ValueError, match=r'other settings: dtype "float32" → "bfloat16"; bring'):
        begin("bfloat16")
    template = tmp_path / "judge/chat_template.jinja"
    template.write_text("{{ messages }}")
    with pytest.raises(ValueError, match=r'other settings: rewards\.helpful\.described "\w{24}" → "'):
        begin()
    template.rename(tmp_path / "policy/chat_template.jinja")
    with pytest.raises(ValueError, match=r'other settings: described "\w{24}" → "\w{24}"; bring'):
        begin()
    (tmp_path / "policy/chat_template.jinja").rename(tmp_path / "policy/README.md")
    assert begin() == 0


def test_weights_that_cannot_be_read_are_told_with_their_folder(tmp_path):
    path = folder_of_weights(tmp_path / "policy", 1.0)
    (tmp_path / "policy/model.safetensors.index.json").write_text(
        '{"weight_map": {"w0": "gone.safetensors"}}'
    )
    with pytest.raises(ValueError, match=r"policy: its weights cannot be read: .*gone\.safetensors"):
        offline.weights_of(path)


def test_a_row_that_cannot_be_rendered_gets_its_reason_and_no_completions(tmp_path):
    class Renderer:
        def render(self, row, max_tokens):
            if row["answer"] == 1:
                raise PromptRefused("too_long", "9 tokens")
            return [1, 2, 3]

        def room(self, length):
            return 64 - length

    class Rewards:
        def check(self, row):
            return

        async def score(self, answer):
            value = float(answer.row["answer"])
            assert answer.prompt_ids == [1, 2, 3]
            return Total(value, {"right": value})

    async def go():
        engine = ScriptedEngine(plain_completion)
        await engine.start()
        predictor = Predictor(engine, Renderer(), SamplingPlan(2, 0.7, 8, 0.9, 5), Rewards())
        await predict(ROWS[:3], output(tmp_path / "out.jsonl"), predictor.line, 4)
        return engine.requests

    requests = asyncio.run(go())
    lines = lines_of(tmp_path / "out.jsonl")
    assert lines[1]["refused"] == "too_long: 9 tokens"
    assert lines[1]["completions"] == []
    expected = {"text": "7", "tokens": 4, "finish_reason": "stop", "logprob": -2.0}
    assert lines[2]["completions"] == 2 * [expected | {"reward": 2.0, "reward_parts": {"right": 2.0}}]
    assert {(r.temperature, r.max_tokens, r.version, r.top_p, r.top_k) for r in requests} == {
        (0.7, 8, 0, 0.9, 5)
    }
    assert len({r.request_id for r in requests}) == 4


class OneBadRow(list):
    """Row 1 cannot be read."""

    def __getitem__(self, number):
        if number == 1:
            raise BadRow("not JSON", "a.jsonl:2")
        return super().__getitem__(number)


def test_a_row_that_cannot_be_read_is_skipped_and_counted_or_ends_it(tmp_path):
    path = tmp_path / "out.jsonl"
    asyncio.run(predict(OneBadRow(ROWS), output(path), upside_down, 2, skip_bad_rows=True))
    lines = lines_of(path)
    assert [line["number"] for line in lines] == list(range(9))
    assert lines[1] == {
        "number": 1,
        "row": None,
        "refused": "bad_row: a.jsonl:2: not JSON",
        "completions": [],
    }
    assert refused_lines(path) == 1
    with pytest.raises(BadRow, match=r"a\.jsonl:2: not JSON"):
        asyncio.run(predict(OneBadRow(ROWS), output(tmp_path / "other.jsonl"), upside_down, 2))


def evaluated(tmp_path, **data):
    source = {"kind": "jsonl", "path": str(tmp_path / "held_out.jsonl")}
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "p0"}\nnot JSON\n{"prompt": "p2"}\n')
    sections = {"name": "e", "run_dir": str(tmp_path), "model": {"path": "m"}, "eval": {"source": source}}
    rewards = {"rewards": {"right": {"function": "rollout.rewards:exact_number"}}}
    experiment = PredictionExperiment.model_validate(
        {**sections, "rollout": rewards, **({"data": {"train": source, **data}} if data else {})}
    )
    assert experiment.eval is not None
    return offline.open_rows(experiment, experiment.eval.source)


def test_rows_of_an_evaluation_that_cannot_be_read_are_counted_where_the_data_section_skips_them(tmp_path):
    rows = evaluated(tmp_path, on_bad_row="skip")

    async def make(number, row):
        completion = {"reward": 1.0, "reward_parts": {}, "tokens": 1, "finish_reason": "stop"}
        return {"number": number, "row": row, "completions": [completion]}

    path = tmp_path / "samples.jsonl"
    asyncio.run(predict(rows, output(path), make, 2, skip_bad_rows=True))
    assert "held_out.jsonl:2" in lines_of(path)[1]["refused"]
    results = offline.results_of(path, has_mark=True)
    assert (results["prompts"], results["refused"], results["score"]) == (2, 1, 1.0)
    assert results.pop("pass@1") == 1.0
    assert offline.results_of(path, has_mark=False) == results


@pytest.mark.parametrize("data", [{}, {"on_bad_row": "fail"}])
def test_a_row_of_an_evaluation_that_cannot_be_read_ends_it_before_the_engine_starts(tmp_path, data):
    with pytest.raises(BadRow, match=r"held_out\.jsonl:2: not JSON"):
        evaluated(tmp_path, **data)
