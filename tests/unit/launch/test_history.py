import json
import os

from launch.history import LIVE_LINES, History, Tail
from launch.overview import clock, count, learner_waits, seconds_left, waiting_share, waste_rate


def line(step: int, time: float, **values: float) -> str:
    return json.dumps({"step": step, "time": time, **values}) + "\n"


def test_only_whole_new_lines_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert tail.new() == [{"a": 1}]
    with path.open("a") as file:
        file.write('2}\n{"a": 3}\n')
    assert tail.new() == [{"a": 2}, {"a": 3}]


def test_a_line_cut_by_a_crash_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": {"a": 2}\n{"a": 3}\n[1]\n')
    assert Tail(path).new() == [{"a": 1}, {"a": 3}]


def test_steps_made_again_after_a_restart_replace_the_first_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 10, reward=0) + line(2, 20, reward=0) + line(3, 30, reward=0))
    history = History(tmp_path)
    assert len(history.refresh()) == 3
    # The learner that resumes from step 1 rewrites the file without what it will make again.
    shorter = tmp_path / "shorter"
    shorter.write_text(line(1, 10, reward=0))
    os.replace(shorter, path)
    assert history.refresh() == []
    assert list(history.steps) == [1]
    with path.open("a") as file:
        file.write(line(2, 99, reward=1))
    assert [r["step"] for r in history.refresh()] == [2]
    assert history.steps[2]["reward"] == 1


def test_a_step_is_new_whatever_the_wall_clock_said_when_it_was_made(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 7200))
    history = History(tmp_path)
    assert len(history.refresh()) == 1
    with path.open("a") as file:
        file.write(line(2, 3600))  # the clock was set back by more than an hour
    assert [record["step"] for record in history.refresh()] == [2]


def test_evaluations_are_read_apart_and_not_doubled(tmp_path):
    completion = {"kind": "completion", "version": 0, "prompt_id": "eval/0/1", "index": 0, "completion": "7"}
    score = {"kind": "score", "version": 0, "score": 0.25}
    dropped = {"kind": "score", "version": 3, "score": None}
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (completion, completion, score, dropped)))
    history = History(tmp_path)
    history.refresh()
    assert history.scores == {0: score}
    assert list(history.completions[0]) == [("eval/0/1", 0)]


def test_time_left_is_the_median_pace_times_the_steps_left(make_run):
    history = History(make_run(steps=20))
    assert seconds_left(history, 24) is None
    history.refresh()
    assert seconds_left(history, 24) == 4 * 30.0
    assert seconds_left(history, 20) == 0


def test_the_first_step_tells_no_pace(tmp_path):
    history = History(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(line(1, 1.0, **{"time/step": 90.0}))
    history.refresh()
    assert seconds_left(history, 10) is None
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line(2, 2.0, **{"time/step": 10.0}))
    history.refresh()
    assert seconds_left(history, 10) == 80.0


def test_waiting_shares(make_run):
    history = History(make_run())
    history.refresh()
    share = learner_waits(list(history.steps.values()))
    assert share is not None
    assert 0.2 < share < 0.4
    lines = [{"time": t, "waiting_s/leases": w} for t, w in ((0, 0), (10, 5), (20, 5), (30, 0), (40, 10))]
    assert waiting_share(lines) == 15 / 30  # the pair around the restart at 30 says nothing
    assert waiting_share(lines[:1]) is None


def test_numbers_for_people():
    assert [clock(s) for s in (48, 200, 7500)] == ["48 s", "3 min 20 s", "2 h 05 min"]
    assert [count(n) for n in (950, 12_400, 3_100_000, 2e9)] == ["950", "12.4k", "3.1M", "2.0G"]


def test_who_watches_a_long_run_keeps_no_more_than_he_looks_at(tmp_path):
    (tmp_path / "metrics").mkdir()
    whole, live = History(tmp_path), History(tmp_path, live=True)
    for turn in range(5):
        for of in ("buffer", "rollout-server-0", "reference", "value"):
            name = f"metrics/{of}.jsonl"
            with (tmp_path / name).open("a") as file:
                file.writelines(json.dumps({"time": 1.0, "n": 80 * turn + i}) + "\n" for i in range(80))
        with (tmp_path / "eval.jsonl").open("a") as file:
            line = {"kind": "completion", "version": turn, "prompt_id": "p", "index": 0}
            file.write(json.dumps(line) + "\n" + json.dumps({"version": turn, "score": 0.5}) + "\n")
        whole.refresh()
        live.refresh()
    for of in ("buffer", "reference", "value"):
        assert len(getattr(whole, of)) == 400
        assert getattr(live, of) == getattr(whole, of)[-LIVE_LINES:]
    assert live.servers["server-0"] == whole.servers["server-0"][-LIVE_LINES:]
    assert set(live.scores) == set(range(5))
    assert len(whole.completions) == 5
    assert not live.completions


def test_what_was_sampled_for_nothing_is_the_servers_and_the_buffers():
    rows = [
        {"time/step": 2.0, "servers/wasted_tokens": 4, "buffer/wasted_tokens": 6},
        {"time/step": 2.0, "servers/wasted_tokens": 2},  # as an older run wrote it
    ]
    assert waste_rate(rows) == 3
    assert waste_rate([{"time/step": 2.0, "buffer/wasted_tokens": 0}]) is None
