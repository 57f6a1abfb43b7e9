"""What is known of a step: sums from the ranks into one row, and where the rows go.

`metrics.jsonl` has one line a step with paths as keys, TensorBoard shows the same, and `samples.jsonl`
has some of the completions that were trained.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from buffer.fields import is_count
from buffer.records import Batch, Group, Trajectory
from buffer.whole_file import write_whole
from learner.advantages import Moments
from learner.collectives import max_over_data, names_over_data, sum_over_data
from learner.ptx import TextReport
from learner.returns import explained_variance

Row = dict[str, Any]
NO_MOMENTS = Moments(0.0, 0.0, 0.0)
SAMPLES = 4
"""Completions written to `samples.jsonl` at a time."""


@dataclass(slots=True)
class ValueReport:
    """What `learner/critic.py` found in one batch, summed over all ranks and the batch's optimizer steps."""

    lr: float
    returns: Moments = NO_MOMENTS
    """Of the trained tokens' returns."""
    errors: Moments = NO_MOMENTS
    """Of what their values were off before the updates."""
    sums: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0

    def add(self, sums: dict[str, float], grad_norm: float, made: bool) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.grad_norms.append(grad_norm)
        self.skipped += not made

    def row(self) -> Row:
        updates = max(len(self.grad_norms), 1)
        return {
            "value/loss": self.sums.get("loss", 0.0) / updates,
            "value/clip_fraction": self.sums.get("clipped", 0.0) / max(self.sums.get("tokens", 0.0), 1.0),
            "value/explained_variance": explained_variance(self.returns, self.errors),
            "value/return_mean": self.returns.mean,
            "value/lr": self.lr,
            "value/grad_norm": sum(self.grad_norms) / updates,
            "value/skipped_updates": self.skipped,
            "time/value": self.seconds,
        }


@dataclass(slots=True)
class StepReport:
    """What `learner/step.py` found in one batch, summed over all ranks and the batch's optimizer steps."""

    lr: float
    kl_coefficient: float = 0.0
    """That the batch was trained with."""
    value: ValueReport | None = None
    """None without a value model."""
    ptx: TextReport | None = None
    """None where no text is mixed in."""
    trained_tokens: int = 0
    """Of the batch; with equal rewards in a group, more than a gradient comes from."""
    completions: int = 0
    """Those with a trained token."""
    sums: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    """Optimizer steps not made because the gradient's norm was not finite."""
    beta: float | None = None
    """Of online DPO; None under another loss."""
    tied_groups: int = 0
    """Those without a pair, under online DPO."""
    forward_backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    reference_seconds: float | None = None
    """Within the seconds of forward and backward passes; None without a reference."""

    def add(self, sums: dict[str, float], grad_norm: float, made: bool) -> None:
        for name, value in sums.items():
            old = self.sums.get(name, 0.0)
            self.sums[name] = max(old, value) if name.endswith("_max") else old + value
        self.grad_norms.append(grad_norm)
        self.skipped += not made

    @property
    def divergence(self) -> float:
        """KL(π ‖ reference) of one completion, in nats: log π - log π_ref, summed over its tokens."""
        return self.sums.get("reference_k1", 0.0) / max(self.completions, 1)

    def row(self) -> Row:
        """Means over the batch's trained tokens with a gradient; of none they are None, fractions 0."""
        of = self.sums
        tokens = of.get("tokens", 0.0)
        mean = {name: value / tokens for name, value in of.items()} if tokens else {}
        unknown = 0.0 if tokens else None
        updates = max(len(self.grad_norms), 1)
        inverse = of.get("inverse_rho_max", 0.0)
        return {
            "loss": of.get("loss", 0.0) / updates,
            "lr": self.lr,
            "grad_norm": sum(self.grad_norms) / updates,
            "skipped_updates": self.skipped,
            "tokens": self.trained_tokens,
            "gradient_fraction": of.get("tokens", 0.0) / max(self.trained_tokens, 1),
            "rho/mean": mean.get("rho"),
            "rho/min": 1 / inverse if inverse else None,
            "rho/max": of.get("rho_max", 0.0),
            "rho/bounded": mean.get("rho_bounded"),
            "rho/ess": effective_share(of, "rho"),
            "ess": effective_share(of, "weight"),
            "kl/k1": mean.get("behavior_k1", unknown),
            "kl/k3": mean.get("behavior_k3", unknown),
            "kl/reference": mean.get("reference_kl", unknown),
            "kl/completion": self.divergence,
            "kl/coefficient": self.kl_coefficient,
            "entropy": mean.get("entropy", unknown),
            "clip_fraction": mean.get("clipped", 0.0),
            "mask_fraction": mean.get("masked", 0.0),
            "veto_fraction": mean.get("vetoed", 0.0),
            "cap_fraction": mean.get("capped", 0.0),
            "time/forward_backward": self.forward_backward_seconds,
            "time/optimizer": self.optimizer_seconds,
            **({"time/reference": self.reference_seconds} if self.reference_seconds is not None else {}),
            **(self.value.row() if self.value is not None else {}),
            **(self.ptx.row() if self.ptx is not None else {}),
            **(pair_row(of, self.tied_groups, self.beta) if self.beta is not None else {}),
        }


def pair_row(sums: dict[str, float], tied: int, beta: float) -> Row:
    """Of online DPO: how the policy orders the batch's pairs, by β Σ log π / π_ref; None of no pair."""
    pairs = int(sums.get("pairs", 0.0))
    preferred, other, correct = (sums.get(n, 0.0) / max(pairs, 1) for n in ("preferred", "other", "correct"))
    told = {
        "dpo/accuracy": correct,
        "dpo/margin": beta * (preferred - other),
        "dpo/chosen": beta * preferred,
        "dpo/rejected": beta * other,
    }
    counts = {"dpo/pairs": pairs, "dpo/groups_without_pair": tied}
    return counts | (told if pairs else dict.fromkeys(told))


def effective_share(sums: dict[str, float], of: str) -> float | None:
    """Effective sample size over the sample size: (Σw)² / (Σw² · N), 1 when all w are equal; None of none.

    Args:
        of: The sum that has w: `rho`, or `weight`, what tokens really weigh in the gradient; of those that
            are not trained that is 0.
    """
    squares, tokens = sums.get(f"{of}_squares", 0.0), sums.get("tokens", 0.0)
    # At most 1 but for the last digit of the sums.
    share = min(1.0, sums[of] ** 2 / (squares * tokens)) if squares and tokens else 0.0
    return share if tokens else None


def batch_row(shard: Batch, max_staleness: int) -> Row:
    """Rewards, lengths and staleness over all shards. Collective over the data-parallel ranks."""
    trajectories = [t for g in shard.groups for t in g.trajectories]
    rewards = np.array([t.reward for t in trajectories], np.float64)
    lengths = np.array([int(t.loss_mask.sum()) for t in trajectories], np.float64)
    ages = np.array([a for t in trajectories if (a := staleness(t, shard.index)) is not None], np.float64)
    equal = sum(len({t.reward for t in g.trajectories}) == 1 for g in shard.groups)
    cut = sum(t.finish_reason == "length" for t in trajectories)
    all_tokens = sum(g.num_tokens for g in shard.groups)
    bins = ages.clip(0, max_staleness).astype(np.int64)
    histogram = np.bincount(bins, minlength=max_staleness + 1).tolist()
    count, groups, aged, reward, square, length, age, equal, cut, all_tokens, *histogram = sum_over_data(
        [
            *(len(trajectories), len(shard.groups), len(ages), rewards.sum(), (rewards**2).sum()),
            *(lengths.sum(), ages.sum(), equal, cut, all_tokens, *histogram),
        ]
    )
    longest, oldest = max_over_data([lengths.max(initial=0.0), ages.max(initial=0.0)])
    count, groups, aged = max(count, 1.0), max(groups, 1.0), max(aged, 1.0)
    return {
        "reward/mean": reward / count,
        "reward/std": max(square / count - (reward / count) ** 2, 0.0) ** 0.5,
        "reward/equal_groups": equal / groups,
        "samples": int(count),
        "groups": int(groups),
        "all_tokens": int(all_tokens),
        "completion/length_mean": length / count,
        "completion/length_max": longest,
        "completion/cut_fraction": cut / count,
        "staleness/mean": age / aged,
        "staleness/max": oldest,
        "staleness/histogram": [int(n) for n in histogram],
        **_reward_parts(trajectories),
    }


def _reward_parts(trajectories: Sequence[Trajectory]) -> Row:
    """Mean of each named part over the completions that have it."""
    names = names_over_data({name for t in trajectories for name in t.reward_parts})
    if not names:
        return {}
    found = [[t.reward_parts[name] for t in trajectories if name in t.reward_parts] for name in names]
    sums = sum_over_data([*map(sum, found), *map(len, found)])
    return {f"reward_parts/{n}": s / k for n, s, k in zip(names, sums, sums[len(names) :], strict=False)}


def staleness(trajectory: Trajectory, index: int) -> int | None:
    """Versions between the learner at batch `index` and the oldest trained token; None without one."""
    versions = trajectory.versions[trajectory.loss_mask > 0]
    return index - int(versions.min()) if len(versions) else None


class Timings:
    """Seconds by name; `with timings("publish"):` adds to it."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def __call__(self, name: str) -> "_Span":
        return _Span(self._spent, name)

    def take(self) -> Row:
        """What was measured since the last call, as `time/…` keys."""
        row = {f"time/{name}": seconds for name, seconds in self._spent.items()}
        self._spent.clear()
        return row


class _Span:
    def __init__(self, spent: dict[str, float], name: str) -> None:
        self._spent, self._name = spent, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._started
        self._spent[self._name] = self._spent.get(self._name, 0.0) + spent


class Journal:
    """Writes the rows; on global rank 0 only."""

    def __init__(self, run_dir: Path, tensorboard: bool, version: int, samples: bool = True) -> None:
        """Args:
        version: Where the run starts or resumes; rows of later steps, which it will make again, are removed.
        samples: Whether the job has any to write: an offline stage makes no completions.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        # Kept open: a job that is out of file handles trains on.
        self._metrics_path = run_dir / "metrics.jsonl"
        self._metrics = _kept(self._metrics_path, version)
        self._samples = _kept(run_dir / "samples.jsonl", version) if samples else None
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=version + 1)

    def row(self, step: int) -> Row | None:
        """What was written last of a step; None if nothing was."""
        lines = self._metrics_path.read_text().splitlines()
        return next((row for line in reversed(lines) if (row := json.loads(line)).get("step") == step), None)

    def write(self, row: Row) -> None:
        _append(self._metrics, [row])
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, row["step"])
            self._draw_ages(row.get("staleness/histogram", []), row["step"])
            self._board.flush()

    def _draw_ages(self, counts: list[int], step: int) -> None:
        """How many completions are 0, 1, … versions old."""
        ages = [age for age, count in enumerate(counts) for _ in range(count)]
        if ages:
            sums = {"num": len(ages), "sum": sum(ages), "sum_squares": sum(age**2 for age in ages)}
            edges = [age + 0.5 for age in range(len(counts))]
            self._board.add_histogram_raw(
                "staleness/histogram", min(ages), max(ages), **sums,
                bucket_limits=edges, bucket_counts=counts, global_step=step,
            )  # fmt: skip

    def write_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Some completions of a batch that was trained into version `step`."""
        rows = [_sample(step, g, t) for g in groups[:1] for t in g.trajectories[:SAMPLES]]
        assert self._samples is not None, "a job that said it had none"
        _append(self._samples, rows)

    def close(self) -> None:
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()
        if self._board is not None:
            self._board.close()


def _sample(step: int, group: Group, trajectory: Trajectory) -> Row:
    sampled = trajectory.versions[trajectory.loss_mask > 0].tolist()
    return {
        **trajectory.metadata,
        "step": step,
        "prompt_id": group.prompt_id,
        "index": trajectory.index,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "finish_reason": trajectory.finish_reason,
        "turns": trajectory.turns,
        "tokens": len(sampled),
        "versions": [min(sampled, default=0), max(sampled, default=0)],
    }


def _append(file: TextIO, rows: Iterable[Row]) -> None:
    file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    file.flush()


def _kept(path: Path, version: int) -> TextIO:
    """The file, to be appended to, without the rows of steps after `version` and a last line that was cut
    short."""
    if path.exists():
        _keep_until(path, version)
    return path.open("a")


def _keep_until(path: Path, version: int) -> None:
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and is_count(row.get("step", 0)) and row.get("step", 0) <= version:
            kept.append(line + "\n")
    write_whole(path, "".join(kept))
