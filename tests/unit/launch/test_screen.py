import io
import json

import pytest
from rich.console import Console

from launch.experiment import read
from launch.history import History
from launch.screen import LONGEST_ALARM, MOST_ALARMS, Alarms, Screen, phase_of, render, sparkline


class Running:
    def states(self) -> dict[str, str]:
        return {"buffer": "running", "server-0": "lost", "learner": "ended"}


def drawn(run_dir, config_file, alarms=()) -> str:
    history = History(run_dir, opened=0.0)
    history.refresh()
    console = Console(width=110, file=io.StringIO(), force_terminal=True, color_system=None)
    e = read(config_file, [])
    console.print(render(e, history, phase_of(e, history), Running().states(), 700.0, alarms, 107))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_screen_shows_what_is_asked_of_it(make_run, config_file):
    text = drawn(make_run(steps=20), config_file, ["learner │ WARNING something"])
    for part in (
        "slipstream made · training", "20/24 steps", "2 min 00 s left", "v0 0.200 → v12 0.500", "target 0.8",
        "2 at most (bound 2)", "generated", "trained", "learner waits for batches", "servers wait for leases",
        "generation paused 0.10 s", "2 evicted", "● buffer", "✗ server-0", "✓ learner", "WARNING something",
        "11 min 40 s", "right 0.400 · short 0.125", "2 sampled for nothing",
    ):  # fmt: skip
        assert part in text, part


def test_the_newest_alarm_is_told_in_full(make_run, config_file):
    alarms = [f"{name} │ {'what happened, ' * 9}do {name}" for name in ("this", "that")]
    text = drawn(make_run(steps=20), config_file, alarms)
    assert "do that" in text
    assert "do this" not in text


def evaluating(make_run, left: int) -> History:
    history = History(make_run(steps=0), opened=0.0)
    history.refresh()
    history.buffer.append({"time": 1e12, "published": 0, "eval_left": left})
    history.servers["server-0"] = [{"time": 1e12}]
    return history


@pytest.mark.parametrize(("left", "told"), [(1, "1 prompt left"), (16, "16 prompts left"), (0, None)])
def test_an_evaluation_under_way_says_how_much_is_to_come(left, told, make_run, config_file):
    console = Console(width=110, file=io.StringIO())
    history = evaluating(make_run, left)
    console.print(render(read(config_file, []), history, "", Running().states(), 1.0, (), 107))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert ("evaluating" in shown) == (told is not None)
    assert told is None or told in shown


def test_an_empty_run_says_what_it_waits_for(tmp_path, config_file):
    text = drawn(tmp_path / "empty", config_file)
    assert "starting: the engines and the learner load the model" in text
    assert "0/24 steps" in text


@pytest.mark.parametrize(
    ("steps", "buffer", "phase"),
    [
        (0, {"frontier": 0, "published": 0, "eval_left": 3}, "evaluating version 0"),
        (0, {"frontier": 0, "published": 0, "eval_left": 0}, "generating the first groups"),
        (0, {"frontier": 1, "published": 0, "eval_left": 0}, "training on the first batch"),
        (10, {"frontier": 10, "published": 10, "eval_left": 2}, "evaluating version 10"),
        (10, {"frontier": 11, "published": 10, "eval_left": 0}, "training"),
        (24, {"frontier": 24, "published": 24, "eval_left": 2}, "evaluating for the last time"),
    ],
)
def test_what_goes_on_is_told_in_a_word(make_run, config_file, steps, buffer, phase):
    run_dir = make_run(steps=steps)
    history = History(run_dir)
    history.opened = 0.0
    history.refresh()
    now = {"time": 1e12}
    history.buffer.append(buffer | now)
    history.servers["server-0"] = [now]
    assert phase_of(read(config_file, []), history) == phase


def test_without_a_terminal_a_step_is_a_line(make_run, config_file):
    run_dir = make_run(steps=0)
    history = History(run_dir)
    history.refresh()
    output = io.StringIO()
    with Screen(read(config_file, []), history, Running(), Console(file=output, width=80)) as screen:
        screen.update()
        rows = (run_dir / "metrics.jsonl").open("a")
        with rows:
            rows.write(json.dumps({"step": 1, "time": 5.0, "time/step": 30.0, "reward/mean": 0.25}) + "\n")
            alike = {"gradient_fraction": 0.0, "reward/equal_groups": 1.0}
            rows.write(
                json.dumps({"step": 2, "time": 6.0, "time/step": 1.0, "reward/mean": 1.0} | alike) + "\n"
            )
        (run_dir / "eval.jsonl").write_text(json.dumps({"kind": "score", "version": 1, "score": 0.5}) + "\n")
        screen._due = 0.0
        screen.update()
        screen._due = 0.0
        screen.update()
    lines = output.getvalue().splitlines()
    assert lines.count("step 1/24 · reward 0.250 · 22 s left") == 1
    assert [line.split(" · ")[:3] for line in lines if line.startswith("step 2/24")] == [
        ["step 2/24", "reward 1.000", "taught nothing, rewards are alike"]
    ]
    assert lines.count("eval of version 1: 0.500") == 1
    assert "\x1b" not in output.getvalue()


def test_a_long_silence_is_filled(make_run, config_file, monkeypatch):
    history = History(make_run(steps=0))
    output = io.StringIO()
    with Screen(read(config_file, []), history, Running(), Console(file=output, width=80)) as screen:
        screen.update()
        monkeypatch.setattr("launch.screen.LONGEST_SILENCE_S", 0.0)
        screen._due = 0.0
        screen.update()
        screen.alarms.up |= {"buffer", "server-0", "learner"}
        screen._due = 0.0
        screen.update()
    first, *_, before, last = output.getvalue().splitlines()
    assert first == "starting: the engines and the learner load the model"
    assert before == "still starting (not up yet: buffer, server-0, learner) · 0 s since the start"
    assert last.startswith("still starting (all services are up; the learner publishes the first version)")


def test_a_service_is_up_once_it_says_so(tmp_path):
    log = tmp_path / "scorer-helpful.log"
    log.write_text("2026-01-01 00:00:01,000 INFO rollout.scorer.service: scorer helpful is up at ipc://a\n")
    alarms = Alarms(tmp_path)
    assert alarms.refresh() == []
    assert alarms.up == set(), "it was that of the start before"
    for name, told in {
        "buffer": "INFO buffer.service: buffer of demo is up at ipc:///b, 3 prompts",
        "learner": "INFO rank 0 learner.service: the learner is up at step 3",
        "server-0": "INFO rollout.service: rollout server server-0 starts vLLM",
        "server-1": "INFO 09-09 [cpu_worker.py:3] the model is up",
        "value": "INFO learner.apart.job: the value model is up at tcp://c, weights 3",
    }.items():
        (tmp_path / f"{name}.log").write_text(f"2026-01-01 00:00:02,000 {told}\n")
    with log.open("a") as file:
        file.write("2026-01-01 00:00:03,000 INFO rollout.scorer.service: scorer helpful is up at ipc://a\n")
    assert alarms.refresh() == []
    assert alarms.up == {"buffer", "learner", "value", "scorer-helpful"}


def test_a_run_that_stops_tells_of_no_new_phase(make_run, config_file, monkeypatch):
    monkeypatch.setattr("launch.screen.LONGEST_SILENCE_S", 0.0)
    output = io.StringIO()
    with Screen(
        read(config_file, []), History(make_run(steps=0)), Running(), Console(file=output, width=80)
    ) as screen:
        screen.stopping = True
        screen.update()
    assert output.getvalue().splitlines() == [
        "eval of version 0: 0.200",
        "still stopping · 0 s since the start",
    ]


def test_a_long_evaluation_is_told_with_what_is_left_of_it(make_run, config_file, monkeypatch):
    monkeypatch.setattr("launch.screen.LONGEST_SILENCE_S", 0.0)
    output, history = io.StringIO(), evaluating(make_run, 16)
    with Screen(read(config_file, []), history, Running(), Console(file=output, width=80)) as screen:
        screen.update()
    assert (
        output.getvalue().splitlines()[-1]
        == "still evaluating version 0, 16 prompts left · 0 s since the start"
    )


def test_alarms_are_the_services_own_new_warnings(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text("2026-01-01 00:00:00,000 ERROR learner.loop: of the run before\n")
    alarms = Alarms(tmp_path)
    with log.open("a") as file:
        file.write("WARNING 01-01 00:00:00 [cpu_worker.py:68] of vLLM\n")
        file.write("2026-01-01 00:00:01,000 INFO learner.loop: fine\n")
        file.write("2026-01-01 00:00:02,000 WARNING rank 0 learner.loop: look here\n")
    (tmp_path / "buffer.log").write_text(
        "2026-01-01 00:00:02,000 ERROR buffer.server: and here\n2026-01-01 cut"
    )
    assert [line.partition(" │ ")[0] for line in alarms.refresh()] == ["buffer", "learner"]
    assert list(alarms.last) == ["buffer │ 00:00:02 and here", "learner │ 00:00:02 rank 0 look here"]
    assert alarms.refresh() == []


def test_what_is_said_again_and_again_is_shown_ever_more_rarely(tmp_path):
    log = tmp_path / "server-0.log"
    log.touch()
    alarms, shown = Alarms(tmp_path), []
    for number in range(120):
        with log.open("a") as file:
            file.write(
                f"2026-01-01 00:00:{number % 60:02},000 WARNING rollout.loop: prompt 1/{number} fails\n"
            )
        shown += alarms.refresh()
    told = [line.partition(": ")[2] or line for line in shown]
    assert len(shown) == 5, told
    assert "prompt 1/2 fails" in shown[2]
    assert f"prompt 1/9 fails (said 10 times, all of them in {log})" in shown[3]
    assert "prompt 1/99 fails (said 100 times" in shown[4]


def test_the_same_said_of_several_is_shown_of_each(tmp_path):
    alarms = Alarms(tmp_path)
    line = "2026-01-01 00:00:01,000 WARNING learner.publishing: rollout server server-{} lost: no heartbeat\n"
    for number in range(8):
        with (tmp_path / "learner.log").open("a") as file:
            file.write(line.format(number))
        assert len(alarms.refresh()) == 1


def test_a_flood_of_alarms_is_cut_and_counted(tmp_path):
    alarms = Alarms(tmp_path)
    line = "2026-01-01 00:00:01,000 WARNING rollout.loop: gave up prompt {}: " + "x" * 5000 + "\n"
    (tmp_path / "server-0.log").write_text("".join(line.format(chr(0x3B1 + i)) for i in range(50)))
    found = alarms.refresh()
    assert len(found) == MOST_ALARMS
    assert found[-1] == f"server-0 │ … and 47 more, all of them in {tmp_path}/server-0.log"
    assert max(map(len, found)) < LONGEST_ALARM + 50


def test_sparkline_spans_low_to_high_and_fits():
    assert sparkline([0, 1], 10) == "▁█"
    assert len(sparkline(range(100), 40)) <= 40
    assert sparkline([0.5], 10) == "▁"
