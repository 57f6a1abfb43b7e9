"""Every service and process of a run killed with -9 at random moments, under load: one after the other, and
again while the run recovers.

    make chaos             ten minutes of each, and what was seen in benchmarks/results/chaos.json

Of a run with two servers and a rule for a reward, and of PPO with four models in processes of their own.
`CHAOS_SECONDS` says for how long, `CHAOS_SEED` which moments and victims.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hand_started import HOME, Processes, Services, assert_trained_once, services

from benchmarks.record import stamp

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
RECORD = os.environ.get("CHAOS_RECORD")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200 + 3 * SECONDS)]

PROMPTS, GROUPS = 40, 4
ENDLESS, MORE = 1_000_000, 4
"""Steps while there is chaos; steps to be made in peace afterwards."""
CALM_S = 240
"""At the longest from a kill to the learner's next step, of which a server's start takes the most."""
TWO_SERVERS = {"buffer": "buffer", "server-0": "rollout", "server-1": "rollout", "learner": "learner"}
FOUR_MODELS = {role: role for role in ("buffer", "scorer", "reference", "value", "learner")}
FOUR_MODELS |= {"server-0": "rollout"}
VICTIMS = ("buffer", "rollout", "engine core", "engine worker", "learner rank", "torchrun")
APART = ("scorer", "reference rank", "value rank")


class Chaos:
    """A run whose services are started again whenever one has ended."""

    def __init__(
        self, folder: Path, running: Services, names: dict[str, str], victims: tuple[str, ...]
    ) -> None:
        """Args:
        folder: Where it is at work.
        running: Its processes.
        names: Of all of its services, with the role of each.
        victims: What may be killed, each as often as the others.
        """
        self.running = running
        self.names = names
        self.victims = victims
        self.processes = Processes(folder)
        self.random = random.Random(SEED)
        self.kills: Counter[str] = Counter()
        self.again = 0
        """Of them, how many came before the run had made another step."""
        self.calm_seconds: list[float] = []

    def revive(self, *more: str) -> None:
        for name, service in self.names.items():
            process = self.running.running.get(name)
            if process is None or process.poll() is not None:
                self.running.start(service, name if service == "rollout" else None, *more)

    def wait_for_steps(self, count: int, *more: str) -> None:
        """Until the learner has made so many more, starting again what ends meanwhile."""
        goal = len(self.running.rows()) + count
        started = time.monotonic()
        while len(self.running.rows()) < goal:
            self.revive(*more)
            waited = time.monotonic() - started
            told = "\n".join(f"== {name}\n{self.running.log(name)[-2000:]}" for name in self.names)
            assert waited < CALM_S, f"no step within {CALM_S} s after {dict(self.kills)}\n{told}"
            time.sleep(0.2)
        self.calm_seconds.append(time.monotonic() - started)

    def stop(self) -> None:
        """As Ctrl-C does, the learner first, which writes a checkpoint with the others' part in it; a server
        that is just starting ends with another code than 0."""
        running = self.running.running
        for process in (running["learner"], *running.values()):
            process.send_signal(signal.SIGINT)
            process.wait(120)

    def strike(self) -> None:
        """Kill one, and as often as not one or two more while the run recovers from that: what was started
        again, perhaps, which then dies while it starts."""
        self.kill()
        for _ in range(self.random.choice((0, 0, 1, 2))):
            self.revive()
            time.sleep(self.random.uniform(0, 15))
            self.kill()
            self.again += 1

    def kill(self) -> None:
        kind = self.random.choice(self.victims)
        victims = [pid for pid, of in self.processes.all().items() if of == kind]
        if victims:
            os.kill(self.random.choice(sorted(victims)), signal.SIGKILL)
            self.kills[kind] += 1


@pytest.mark.long
def test_a_run_survives_whatever_is_killed(make_experiment, free_address):
    survives("two servers", make_experiment, free_address, TWO_SERVERS, VICTIMS, {}, {})


@pytest.mark.long
def test_ppo_with_four_models_survives_whatever_is_killed(make_experiment, free_address, made_reward_model):
    engine = {"kv_cache_gib": 0.25, "max_num_seqs": 64}
    helpful = {"model": str(made_reward_model), "dtype": "float32", "engine": engine}
    rollout = {"rewards": {"helpful": helpful | {"address": free_address()}}}
    learner = {
        "algorithm": {"advantage": "gae", "kl": {"coefficient": 0.05, "placement": "reward"}},
        "reference": {"address": free_address()},
        "value": {"path": str(made_reward_model), "ranks": {"address": free_address()}},
    }
    victims = (*VICTIMS, *APART)
    survives("four models", make_experiment, free_address, FOUR_MODELS, victims, rollout, learner)


def survives(
    kind: str,
    make_experiment,
    free_address,
    names: dict[str, str],
    victims: tuple[str, ...],
    rollout: dict[str, Any],
    learner: dict[str, Any],
) -> None:
    """Make such a run, kill what it has, and look at what came of it."""
    folder: Path = make_experiment(
        "chaos",
        rollout=rollout,
        buffer={"groups_per_batch": GROUPS, "address": free_address(), "lease_timeout_s": 20},
        sync={"address": free_address()},
        learner={
            "steps": ENDLESS,
            "optimizer": {"lr": 1e-4},
            "checkpoint": {"every": 3, "keep": 2},
            **learner,
        },
        eval=None,
    )
    with services(folder) as running:
        chaos = Chaos(folder, running, names, victims)
        chaos.wait_for_steps(1)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(chaos.random.uniform(0, 4))
            chaos.strike()
            chaos.wait_for_steps(1)
        chaos.stop()
        steps = len(running.rows()) + MORE
        chaos.wait_for_steps(MORE, f"learner.steps={steps}")
        running.until(lambda: all(p.poll() is not None for p in running.running.values()), 120)
        rows = running.rows()
        left = chaos.processes.all()
    assert left == {}, "orphans"
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), "every version once, in order"
    over = assert_trained_once(folder, steps * GROUPS, PROMPTS)
    assert max(row["staleness/max"] for row in rows) <= 2
    if RECORD:
        record(kind, chaos, steps, len(over))


def record(kind: str, chaos: Chaos, steps: int, epochs: int) -> None:
    """Beside what is there of another kind of run."""
    assert RECORD
    waits = sorted(chaos.calm_seconds)
    path = HOME / RECORD
    there = json.loads(path.read_text()) if path.exists() else {}
    runs = there.get("runs", {})
    runs[kind] = {
        "seconds": SECONDS,
        "seed": SEED,
        "kills": dict(sorted(chaos.kills.items())),
        "before_it_had_recovered": chaos.again,
        "steps": steps,
        "epochs_checked": epochs,
        "median_seconds_to_the_next_step": round(waits[len(waits) // 2], 1),
        "longest_seconds_to_the_next_step": round(waits[-1], 1),
        **stamp(),
    }
    path.write_text(json.dumps({"benchmark": "chaos", "runs": runs}, indent=2) + "\n")
