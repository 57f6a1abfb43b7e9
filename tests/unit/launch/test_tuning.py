"""Costs out of a run's metrics, and back into the run."""

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from rich.console import Console

from buffer.config import BufferConfig
from buffer.records import Group, Trajectory
from buffer.staleness import Rules
from launch import calibration, tuning_screen
from launch.calibration import calibrate, fit_contention, work_and_pace
from launch.experiment import dump, read
from launch.history import History
from launch.simulation import Costs, Outcome, RulePool, Setting, Simulation, Work, simulate
from launch.tuning import Trial, recommend, setting_of, try_all
from rollout.config import RolloutConfig
from rollout.metrics import Meters, Started

COSTS = Costs(
    work=(4.0, 5.0, 5.0, 9.0), contention=0.4, train=0.5, send=0.6, load=(0.3, 0.1), pause=0.2, step=0.4
)
OWN = BufferConfig(groups_per_batch=4, max_staleness=1)
ROLLOUT = RolloutConfig(max_groups=8, group_size=2)


class Metered:
    """The buffer of a simulation of one server, which the server's own meters watch."""

    def __init__(self, costs: Costs, setting: Setting) -> None:
        self._pool = RulePool(setting.rules, setting.capacity, costs.work, seed=1)
        self.simulation = Simulation(costs, setting, self)
        self.meters = Meters("s", lambda: self.simulation.now)
        self._started: dict[int, Started] = {}

    def lease(self, limit: int) -> list[Work]:
        leases = self._pool.lease(limit)
        self._started |= {lease.lease: self.meters.group_started() for lease in leases}
        return leases

    def deliver(self, group: Work) -> None:
        tokens = np.ones(round(100 * group.work), np.int32)
        made = Trajectory(
            0, tokens, tokens.astype(np.uint8), -tokens.astype(np.float32), tokens, 1.0, {}, "stop"
        )
        self.meters.delivered(Group("g", "l", "p", "train", (made,)), True, self._started.pop(group.lease))
        self.meters.group_ended()
        self._pool.deliver(group)

    def batch(self, index: int) -> list[Work] | None:
        return self._pool.batch(index)

    def published(self, version: int) -> None:
        self.meters.version = version
        self._pool.published(version)

    def evicted(self) -> int:
        return self._pool.evicted()


def written(folder: Path, lines: list[dict]) -> History:
    """A run's folder whose one server wrote this."""
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    (folder / "metrics" / "rollout-s.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    history = History(folder)
    history.refresh()
    return history


def groups_beside(costs: Costs, counts) -> list[dict]:
    """What a server would write of four groups beside so many, for each of these."""
    slower = [1 + costs.contention * (n - 1) for n in counts]
    return [
        {
            "time": float(i), "busy_s": 0.5, "groups_in_hand": n,
            "group_tokens": [10 * w for w in costs.work],
            "group_seconds": [w * by for w in costs.work], "group_in_hand": [n] * 4,
            "group_in_hand_variance": [0.0] * 4,
        }
        for i, (n, by) in enumerate(zip(counts, slower, strict=True))
    ]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    """A run whose services cost what COSTS says, as its own setting would have gone."""
    setting = setting_of(OWN, ROLLOUT, 1, 1, 4)
    assert setting is not None
    made = simulate(COSTS, setting, 200, 20)
    folder = tmp_path / "run"
    (folder / "metrics").mkdir(parents=True)
    seconds = 4 / made.groups_per_second
    row = {
        "groups": 4, "samples": 8, "time/step": seconds, "time/wait_batch": made.learner_idle * seconds,
        "time/publish": COSTS.send, "time/optimizer": COSTS.step, "sync/pause_seconds": COSTS.pause,
        "staleness/mean": made.staleness_mean, "staleness/max": made.staleness_max,
    }  # fmt: skip
    arrived = [COSTS.load[i % 2] + COSTS.pause for i in range(31)]
    loaded = [{"sync/version": i, "sync/arrival_seconds": arrived[i]} for i in range(31)]
    steps = [{"step": i, "time": i * seconds, **row, **loaded[i]} for i in range(1, 31)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in steps))
    written(folder, groups_beside(COSTS, [6, 8] * 20))
    (folder / "metrics" / "buffer.jsonl").write_text(json.dumps({"evicted": 0, "delivered": 120}) + "\n")
    return folder


def test_costs_are_found_again_in_what_a_run_wrote(run_dir):
    history = History(run_dir)
    history.refresh()
    costs = calibrate(history, 12)
    assert costs.contention == pytest.approx(0.4, abs=1e-6)
    assert fmean(costs.work) == pytest.approx(fmean(COSTS.work), rel=1e-3)
    assert costs.train == pytest.approx(0.5, rel=0.1), "what waiting for the last load takes is in it"
    assert (costs.send, costs.pause, costs.step) == pytest.approx((0.6, 0.2, 0.4))
    assert sorted(set(costs.load)) == pytest.approx([0.1, 0.3]), "without the pause, which comes behind it"
    assert costs.pace == pytest.approx([1.0] * len(costs.pace))


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("contention", [0.0, 0.2, 0.5, 1.0])
def test_the_contention_of_a_run_is_found_in_what_its_server_wrote(tmp_path, staleness, contention):
    """Groups of which each has others beside it as they come and go."""
    chance = random.Random(5)
    work = tuple(chance.lognormvariate(1, 0.5) for _ in range(200))
    costs = Costs(work, contention, train=0.8, send=0.5, load=(0.3,), pause=0.1)
    run = Metered(costs, Setting(1, 12, 12, Rules(4, staleness), 10**6))
    run.simulation.run(steps=60, warm_up=0)
    found = fit_contention(written(tmp_path, [run.meters.line()]), 12)
    assert found == pytest.approx(contention, abs=0.1)


def test_a_run_with_as_many_groups_in_hand_all_the_time_cannot_tell_contention(tmp_path):
    assert fit_contention(written(tmp_path, groups_beside(COSTS, [3, 3] * 30)), 12) is None
    assert fit_contention(written(tmp_path, groups_beside(COSTS, [3, 5])), 12) is None
    assert fit_contention(written(tmp_path, groups_beside(COSTS, [1, 2, 4, 9] * 10)), 12) == pytest.approx(
        0.4
    )
    of_before = [{"busy_s": 1.0, "groups_in_hand": n, "group_seconds": [1.0] * 9} for n in (1, 2, 4, 9)]
    assert fit_contention(written(tmp_path, of_before), 12) is None, "of a server that did not tell them"


def waves(counts, tokens, slowness, seconds_a_token=0.1) -> list[dict]:
    """What a server writes of groups that begin and end together, one wave a line, each as slow as it is."""
    return [
        {
            "time": float(i), "busy_s": 1.0, "groups_in_hand": counts, "group_tokens": of,
            "group_seconds": [n * seconds_a_token * slow for n in of], "group_in_hand": [counts] * len(of),
            "group_in_hand_variance": [0.0] * len(of),
        }
        for i, (of, slow) in enumerate(zip(tokens, slowness, strict=True))
    ]  # fmt: skip


def test_what_slows_a_whole_wave_is_the_servers_pace_and_no_groups_own(tmp_path):
    slowness = [1.0, 0.8, 1.2, 1.0, 0.8, 1.2, 1.0]
    work, pace = work_and_pace(written(tmp_path, waves(4, [[90] * 4] * 7, slowness)), 0.0, 12)
    assert work == pytest.approx([9.0] * 24), "alike, as they are; the first wave is the engine's warming up"
    assert pace == pytest.approx(slowness[1:])


def test_what_is_longer_than_those_beside_it_is_a_groups_own(tmp_path):
    tokens = [[30, 60, 90, 120]] * 7
    work, pace = work_and_pace(written(tmp_path, waves(4, tokens, [1.0] * 7)), 0.0, 12)
    assert work == pytest.approx([3.0, 6.0, 9.0, 12.0] * 6)
    assert pace == pytest.approx([1.0] * 6)


def test_groups_that_wait_for_the_engine_are_told_from_those_that_it_decodes(tmp_path):
    """Eight in hand, four decoded: each waits as long as it is decoded, here 9 s at a contention of 1/3."""
    lines = waves(8, [[90] * 8] * 6, [2.0] * 6)
    work, _ = work_and_pace(written(tmp_path, lines), 1 / 3, decoded=4)
    assert work == pytest.approx([9.0 / 2] * 40)
    assert work_and_pace(written(tmp_path, lines), 1 / 3, decoded=8)[0] == pytest.approx([18 * 0.3] * 40)


def test_a_run_of_before_arrivals_were_told_is_taken_by_its_loads():
    records = [{"sync/version": v, "sync/load_seconds": 0.5, "sync/pause_seconds": 0.2} for v in (1, 2, 2)]
    assert calibration.loads(records) == pytest.approx([0.3, 0.3]), "each version once"


def test_a_run_that_tells_no_durations_is_taken_by_littles_law(run_dir):
    lines = [{"time": float(t), "busy_s": 1.0, "groups_in_hand": 6, "groups": 3 * t} for t in range(30)]
    assert calibration.group_seconds(written(run_dir, lines)) == [pytest.approx(6 / 3)]


def test_the_groups_that_a_server_starts_with_are_left_out(run_dir):
    lines = [{"time": 0.0, "groups_in_hand": 3.6, "group_seconds": [50.0, 50.0]}]
    lines += [
        {"time": 1.0 + t, "groups_in_hand": 3, "group_seconds": [50.0 if t < 2 else 2.0]} for t in range(6)
    ]
    assert calibration.group_seconds(written(run_dir, lines)) == [2.0] * 4


def test_a_run_too_short_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="expected three or more, or what `slipstream measure` writes"):
        calibrate(History(tmp_path), 12)


def test_costs_of_both_sides_alone_are_put_together(run_dir, tmp_path):
    """Work and what loading costs are the servers', training and sending the learner's."""
    row = {"groups": 4, "samples": 8, "time/step": 5.0, "time/wait_batch": 0.5, "time/wait_loaded": 0.25}
    row |= {"time/publish": 1.25, "time/optimizer": 0.6, "sync/arrival_seconds": 9.0}
    row |= {"sync/pause_seconds": 9.0}
    lines = "".join(json.dumps({"step": i, "time": 5.0 * i, **row}) + "\n" for i in range(1, 9))
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner/metrics.jsonl").write_text(lines)
    servers, learner = History(run_dir), History(tmp_path / "learner")
    for history in (servers, learner):
        history.refresh()
    found = calibration.alone(servers, None, learner, 12)
    assert (found.costs.train, found.costs.step) == pytest.approx((2.4 / 4, 0.6))
    assert (found.costs.send, found.costs.pause) == pytest.approx((1.25, 0.2))
    assert sorted(set(found.costs.load)) == pytest.approx([0.1, 0.3])
    assert fmean(found.costs.work) == pytest.approx(fmean(COSTS.work), rel=1e-3)
    assert found.train == pytest.approx(4.25), "a batch, without what it waited for"
    assert found.generate == pytest.approx(servers.steps[9]["time/step"])


@pytest.mark.parametrize("contention", [0.0, 0.3, 1.0])
def test_contention_is_found_of_the_seconds_at_two_numbers_of_groups(contention):
    at = {n: (n, 3.0 * (1 + contention * (n - 1))) for n in (2.0, 7.5)}
    assert calibration.contention_between(at[7.5], at[2.0]) == pytest.approx(contention)


def test_seconds_that_rise_faster_than_groups_are_full_contention():
    assert calibration.contention_between((8, 40.0), (2, 5.0)) == 1


def outcome(rate: float, idle: float = 0.5) -> Outcome:
    return Outcome(rate, idle, 0.0, 1.0, 1, 0.0, 1.0)


def test_the_recommended_setting_is_the_cheapest_of_the_fast():
    trials = [
        Trial(1, 0, 4, outcome(1.0)), Trial(1, 2, 4, outcome(1.96)), Trial(1, 4, 4, outcome(1.97)),
        Trial(2, 1, 4, outcome(2.0, 0.05)), Trial(1, 1, 8, outcome(2.04)),
    ]  # fmt: skip
    best, why = recommend(trials, 4)
    assert best == trials[1], "the larger batch is within 5 %, and changes how the policy learns"
    assert "generation is the limit" in why
    assert recommend([trials[0], trials[3]], 4)[1].endswith("the learner is the limit")
    faster = [*trials, Trial(1, 1, 8, outcome(2.2))]
    assert recommend(faster, 4)[0] == faster[-1], "this one is not"


def test_settings_that_the_buffer_refuses_are_left_out_and_capacity_follows():
    own = BufferConfig(groups_per_batch=4, max_staleness=4, policy="uniform", capacity=20)
    assert setting_of(own, ROLLOUT, 1, 1, 4) is None
    assert setting_of(own, ROLLOUT, 1, 4, 4) == Setting(1, 8, 128, own.rules, 20)
    wide = setting_of(own, ROLLOUT, 1, 4, 64)
    assert wide is not None
    assert wide.capacity == 3 * 64
    tried = try_all(COSTS, own, ROLLOUT, [1], [0, 2], [2])
    assert [t.max_staleness for t in tried] == [2]


def test_the_command_says_how_far_the_prediction_of_the_run_itself_was_off(run_dir, config_file):
    changes = [
        "buffer.groups_per_batch=4",
        "buffer.max_staleness=1",
        "rollout.max_groups=8",
        "rollout.group_size=2",
    ]
    (run_dir / "config.yaml").write_text(dump(read(config_file, changes, [])))
    experiment = read(config_file, [*changes[:1], "buffer.max_staleness=3", *changes[2:]], [])
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    folder = tuning_screen.tune(experiment, run_dir, None, [1, 2], [0, 1], [4], console)
    told = json.loads((folder / "tuning.json").read_text())
    samples = next(entry for entry in told["own_setting"] if entry["name"] == "samples/s")
    assert samples["predicted"] == pytest.approx(samples["measured"], rel=0.1)
    assert [(t["servers"], t["max_staleness"]) for t in told["trials"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert told["recommended"]["groups_per_batch"] == 4
    assert (folder / "tuning.png").read_bytes().startswith(b"\x89PNG")
    shown = console.export_text()
    for word in ("measured", "predicted", "error", "recommended: rollout.servers=", "samples/s"):
        assert word in shown


def test_the_table_is_whole_in_80_columns(tmp_path, config_file):
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    assumed = tuning_screen.Assumed(10.0, 4.0, 0.5, 0.5, 0.6, 0.0)
    tuning_screen.tune(read(config_file, [], []), tmp_path, assumed, [1], [0, 1, 2, 4, 16], [16], console)
    shown = console.export_text()
    assert "…" not in shown
    for word in ("batch", "servers", "bound 0", "bound 16", "samples/s", "mean staleness"):
        assert word in shown


def test_another_batch_is_recommended_beside_the_files_own_and_with_what_it_changes(tmp_path, config_file):
    """Sending takes longer than training a batch, so twice the batch is far faster."""
    experiment = read(config_file, ["buffer.groups_per_batch=8", "rollout.group_size=2"], [])
    assumed = tuning_screen.Assumed(
        generate=1.0, train=4.0, publish=8.0, pause=0.1, spread=0.1, contention=0.0
    )
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    folder = tuning_screen.tune(experiment, tmp_path, assumed, [1], [1, 2], [], console)
    told, shown = json.loads((folder / "tuning.json").read_text()), console.export_text()
    best, own = told["recommended"], told["recommended_at_own_batch"]
    assert (best["groups_per_batch"], own["groups_per_batch"]) == (16, 8)
    assert best["samples_per_second"] == pytest.approx(2 * 16 / (4.0 * 2 + 8.0), rel=0.01)
    assert own["samples_per_second"] == pytest.approx(2 * 8 / (4.0 + 8.0), rel=0.01)
    assert own["versions_per_second"] == pytest.approx(1 / 12, rel=0.01)
    assert sorted({t["groups_per_batch"] for t in told["trials"]}) == [4, 8, 16]
    assert "recommended: rollout.servers=1 buffer.max_staleness=1 buffer.groups_per_batch=16" in shown
    assert "with the file's own batch: rollout.servers=1 buffer.max_staleness=1" in shown
    assert "33% slower" in shown
    assert "fewer versions of the same samples, which changes how the policy learns" in shown


def test_an_assumed_contention_is_told_as_such(run_dir, config_file):
    written(run_dir, groups_beside(COSTS, [3] * 40))
    console = Console(record=True, width=400, file=open("/dev/null", "w"))  # noqa: SIM115
    tuning_screen.tune(read(config_file, [], []), run_dir, None, [1], [1], [4], console)
    assert (
        "contention 1.00 (assumed: servers always had about as many groups in hand, which cannot tell it; "
        "`slipstream measure` does)" in console.export_text()
    )
    written(run_dir, groups_beside(COSTS, [2, 6, 8] * 20))
    console = Console(record=True, width=400, file=open("/dev/null", "w"))  # noqa: SIM115
    tuning_screen.tune(read(config_file, [], []), run_dir, None, [1], [1], [4], console)
    assert "contention 0.40;" in console.export_text()


def test_costs_may_be_assumed_without_a_run(tmp_path, config_file):
    experiment = read(config_file, [], [])
    assumed = tuning_screen.Assumed(10.0, 4.0, 0.5, 0.5, 0.6, 0.0)
    costs = assumed.costs(4)
    assert sum(costs.work) / len(costs.work) == pytest.approx(10)
    assert costs.train == 1
    folder = tuning_screen.tune(
        experiment,
        tmp_path / "new",
        assumed,
        [1],
        [0, 2],
        [4],
        Console(file=open("/dev/null", "w")),  # noqa: SIM115
    )
    told = json.loads((folder / "tuning.json").read_text())
    assert told["own_setting"] == []
    assert told["trials"][1]["samples_per_second"] > told["trials"][0]["samples_per_second"]


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        ({"train": float("inf")}, "the cost 'train' is inf; expected a finite number"),
        ({"work": (1.0, float("nan"))}, "the cost 'work' is nan"),
        ({"load": (-1.0,)}, "the cost 'load' is -1.0"),
        ({"work": (0.0, 0.0)}, "generating takes 0 s"),
    ],
)
def test_costs_that_nothing_can_have_are_one_line(costs, told):
    setting = setting_of(OWN, ROLLOUT, 1, 1, 4)
    assert setting is not None
    with pytest.raises(ValueError, match=told):
        simulate(replace(COSTS, **costs), setting, 5, 1)
