import json
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from launch.history import History
from launch.plots import answered_by, draw_reward, smooth
from launch.report import write_report
from launch.summary import summarize


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_a_finished_run_has_the_whole_report(make_run):
    run_dir = make_run()
    summary = write_report(run_dir)
    folder = run_dir / "report"
    for name in ("reward", "reward_parts", "staleness", "throughput", "time"):
        width, height = size_of((folder / f"{name}.png").read_bytes())
        assert width > 1000
        assert height > 500
        assert f"({name}.png)" in (folder / "summary.md").read_text()
    told = json.loads((folder / "summary.json").read_text())
    assert told["target_reached"] is True
    assert told["finished"] is True
    assert told["steps"] == 24
    assert told["training_seconds"] == 27 * 30.0
    assert told["samples_per_second"] == 64 / 30, "the first step, which waits for the servers, left out"
    assert told["learner_tokens_per_second"] == 60
    assert told["server_tokens_per_second"] == 300, "in the same steps"
    assert "300 a second generated, 60 a second trained, without the first step of a start" in summary.text()
    assert told["evicted"] == 2
    assert told["requeued"] == 5
    assert told["requeued_causes"] == {"evicted": 2, "lost": 3}
    assert told["wasted_tokens"] == 450 + 30, "the buffer's once, though its part is in the steps' rows too"
    assert told["starvation"]["evicted_length_ratio"] == 1.8
    assert "hard prompts trained and generated rewards 0.34 apart (0: alike)" in summary.text()
    assert told["dropped"] == {"failed": 4}
    assert told["staleness_max"] == 2
    assert told["pause_seconds_max"] == 0.5
    assert "target 0.8 REACHED: eval score 0.200 → 0.840 ± 0.031" in summary.text()
    assert told["pass_rates"] == {"pass@1": [0.1, 0.42], "pass@2": [0.2, 0.84]}
    assert "pass@2       0.200 → 0.840" in summary.text()
    assert "| pass@1 | 0.100 → 0.420 |" in (folder / "summary.md").read_text()
    assert told["reward_parts"] == {"right": [0.4, 0.4], "short": [0.125, 0.125]}
    assert "short      0.125 → 0.125" in summary.text()
    assert str(folder) in summary.text()


def test_the_sum_with_a_reward_model_has_no_mark_to_pass(make_run):
    run_dir = make_run()
    written = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert summarize(run_dir).pass_rates
    for weight, shown in ((0.5, False), (0, True)):
        written["rollout"]["rewards"] = {"helpful": {"model": "somewhere", "weight": weight}}
        (run_dir / "config.yaml").write_text(yaml.safe_dump(written))
        assert bool(summarize(run_dir).pass_rates) == shown


def test_a_mean_of_the_last_values_does_not_look_ahead():
    values = [1.0, 3.0, 8.0, 0.0]
    assert smooth(values, 2) == [1.0, 2.0, 5.5, 4.0]
    assert smooth([*values, 100.0], 2)[:4] == smooth(values, 2)


def test_a_missed_target_is_said_plainly(make_run):
    assert "target 0.8 NOT reached: eval score 0.200 → 0.600" in summarize(make_run(last_score=0.6)).text()


def test_an_unfinished_run_is_not_judged(make_run):
    summary = write_report(make_run(steps=13))
    assert summary.target_reached is None
    assert "still open" in summary.text()


def test_a_run_that_goes_on_is_not_judged_by_an_evaluation_of_its_newest_version(make_run):
    text = replace(summarize(make_run(last_score=0.6)), total_steps=1000).text()
    assert "eval score 0.200 → 0.600" in text
    assert "so far, target 0.8 still open" in text


def test_a_run_without_a_step_still_has_a_summary(make_run):
    run_dir = make_run(steps=0)
    for name in ("eval.jsonl", "metrics/rollout-server-0.jsonl", "metrics/buffer.jsonl"):
        (run_dir / name).unlink()
    assert "no evaluation was made" in write_report(run_dir).text()
    assert not list((run_dir / "report").glob("*.png"))


def test_samples_stand_side_by_side_and_survive_markdown(make_run):
    run_dir = make_run()
    write_report(run_dir)
    rows = (run_dir / "report" / "samples.md").read_text().splitlines()
    row = next(r for r in rows if "What is 2 + 3?" in r)
    assert row.count(" | ") == 2, "text with a bar in it must not make a column"
    assert r"Let's see: &lt;2> and \*3\*" in row
    assert r"The sum is<br>5 \| done" in row
    assert "**reward 0**" in row
    assert "**reward 1**" in row


def test_a_folder_without_a_run_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"no config.yaml in it; expected the folder of a run"):
        write_report(tmp_path)


def test_training_is_drawn_by_the_version_that_answered():
    assert answered_by([1, 2, 3, 4], {1: 0.0, 2: 1.0, 3: 2.0, 4: 1.5}) == [0, 0, 0, 1.5]
    assert answered_by([5, 6], {5: 1.0, 6: 3.0}) == [3, 3], "a line that goes back would double on itself"
    assert answered_by([3], {}) == [2], "a run that tells no ages is taken for a synchronous one"


def test_the_first_step_of_each_start_is_left_out_of_the_rates(make_run):
    run_dir = make_run(steps=4)
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, seconds, waited in zip(rows, (60, 10, 40, 10), (50, 0, 30, 0), strict=True):
        row |= {"time/step": seconds, "time/first_publish": waited, "samples": 20, "servers/tokens": 0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarize(run_dir)
    assert (summary.rated_steps, summary.samples_per_second) == (2, 2.0)
    assert summary.server_tokens_per_second is None
    assert re.search(r"tokens +\d+ a second trained, without the first step of a start", summary.text())


@pytest.mark.parametrize(
    ("ages", "axis", "places"),
    [([0, 0, 1], "policy version that answered", [0, 1, 1]), ([0, 1, 2], "step", [1, 2, 3])],
)
def test_steps_that_one_version_answered_are_drawn_side_by_side(tmp_path, ages, axis, places):
    rows = [{"step": i + 1, "reward/mean": 0.5, "staleness/mean": age} for i, age in enumerate(ages)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = History(tmp_path)
    history.refresh()
    axes = Figure().add_subplot()
    draw_reward(axes, history, None)
    assert axes.get_xlabel() == axis
    (line,) = axes.get_lines()
    assert np.asarray(line.get_xdata()).tolist() == places
    assert line.get_label() == "training reward", "of three steps there is no mean over five"


def test_what_a_value_model_and_a_reference_learned_and_steps_not_made_are_in_the_summary(make_run):
    run_dir = make_run(steps=3)
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"value/loss": 0.5 - number / 10, "kl/completion": number / 4, "skipped_updates": 1}
        row |= {"gradient_fraction": min(number, 1), "reward/equal_groups": 1.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = summarize(run_dir).text()
    assert "value loss   0.500 → 0.300" in told
    assert "alike        1 step taught nothing: completions of one prompt earned alike;" in told
    assert "skipped      3 optimizer steps: the gradient was not finite" in told
    assert "KL" not in told, "of a run without a reference it is 0"
    path.write_text("".join(json.dumps(row | {"time/reference": 1.0}) + "\n" for row in rows))
    told = summarize(run_dir).text()
    assert "KL to reference 0.000 → 0.500" in told
    assert "coefficient" not in told, "online DPO's reference is in its loss"
    rows = [row | {"time/reference": 1.0, "kl/coefficient": 0.1} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "KL coefficient  0.100 → 0.100" in summarize(run_dir).text()


def test_every_folder_that_a_run_has_written_is_named(make_run):
    run_dir = make_run(steps=3)
    names = {"model": "config.json", "ema_model": "config.json", "adapter": "adapter_config.json"}
    for folder, file in names.items():
        (run_dir / folder).mkdir()
        (run_dir / folder / file).write_text("{}")
    told = summarize(run_dir).text()
    assert f"averaged     {run_dir}/ema_model" in told
    assert f"adapter      {run_dir}/adapter" in told
    assert "value model" not in told
