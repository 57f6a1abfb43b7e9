"""The records that cross between the services, as numpy arrays and plain values.

Made by rollout servers, kept by the buffer, read by the learner. `buffer/wire.py` says how they look in
bytes.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_REWARD = 1e30
"""A reward, or a part of one, beyond this is a mistake, whose square would not fit the sums that it goes
into."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data. Made by the buffer, read by rollout servers."""

    prompt_id: str
    """Stable over restarts: `{epoch}/{row}` for training, `eval/{version}/{row}` for evaluation."""
    row: dict[str, Any]
    """`prompt` (text or a list of chat messages), optional `answer` and `metadata`, as the source gave it."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """What became of a prompt whose group failed."""

    tries: int
    """So far; what a server that stops hands back is none."""
    most: int
    """After so many it is dropped."""
    queued: bool
    """Whether it will be tried again."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A prompt lent to one server until `timeout_s` after its last renewal."""

    lease_id: str
    prompt: Prompt
    kind: str
    """`train`, or `eval`: an eval group is sampled with the eval section's parameters and never trained."""
    version: int
    """The published policy version when it was granted."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One completion with everything known of it. All arrays have length T, prompt and completion
    together."""

    index: int
    """Position in its group."""
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    """1 where the engine sampled the token; only those are ever trained."""
    behavior_logprobs: NDArray[np.float32]
    """log μ of the sampled token under the distribution it was sampled from; 0 where not sampled."""
    versions: NDArray[np.int32]
    """Policy version whose weights sampled the token; 0 where not sampled."""
    reward: float
    """Within MAX_REWARD of 0, as are its parts."""
    reward_parts: dict[str, float]
    finish_reason: str
    """`stop` or `length`."""
    turns: int = 1
    metadata: dict[str, Any] = field(default_factory=dict)
    """Small printable facts, such as the completion's text; at most a few kilobytes."""


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt. Atomic: stored, trained and evicted as a whole."""

    group_id: str
    """Unique per delivery attempt's content; a second delivery of the same id is a duplicate."""
    lease_id: str
    prompt_id: str
    kind: str
    trajectories: tuple[Trajectory, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(t.token_ids) for t in self.trajectories)

    @property
    def oldest_version(self) -> int:
        """Oldest version among the trained tokens; the staleness rule is about this one."""
        return min(
            (int(t.versions[t.loss_mask > 0].min()) for t in self.trajectories if t.loss_mask.any()),
            default=0,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """What the learner trains one policy version on: `groups_per_batch` groups, or one data-parallel rank's
    shard."""

    index: int
    """Counts from 0; training batch i makes policy version i + 1. The same index always gives the same
    groups."""
    groups: tuple[Group, ...]
    shares: dict[str, int]
    """Of the whole batch over all shards: `groups`, `trajectories`, `tokens`, `trained_tokens`."""
