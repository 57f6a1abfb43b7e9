"""Made groups, stores with a clock that tests move, and the walk through one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.assembly import Assembled
from buffer.config import BufferConfig
from buffer.groups import decode_delivery, encode_group
from buffer.prompts import PromptQueue
from buffer.records import Group, Lease, Trajectory
from buffer.store import Sources, Store


def made_group(
    lease: Lease,
    *,
    group_id: str | None = None,
    versions: tuple[int, ...] | None = None,
    rewards: tuple[float, ...] = (0.0, 1.0),
    prompt_tokens: int = 3,
) -> Group:
    """One completion per reward; its sampled tokens carry `versions`, by default the lease's."""
    labels = np.array(versions or (lease.version,) * 4, np.int32)
    length = prompt_tokens + len(labels)
    mask = np.array([0] * prompt_tokens + [1] * len(labels), np.uint8)
    trajectories = tuple(
        Trajectory(
            index=i,
            token_ids=np.arange(length, dtype=np.int32) + i,
            loss_mask=mask,
            behavior_logprobs=np.where(mask > 0, np.float32(-0.25 * (i + 1)), np.float32(0)).astype(
                np.float32
            ),
            versions=np.concatenate([np.zeros(prompt_tokens, np.int32), labels]),
            reward=reward,
            reward_parts={"correct": reward},
            finish_reason="stop",
            metadata={"text": f"completion {i}"},
        )
        for i, reward in enumerate(rewards)
    )
    name = group_id or f"group-{lease.lease_id}"
    return Group(name, lease.lease_id, lease.prompt.prompt_id, lease.kind, trajectories)


@dataclass
class Bench:
    """A store on disk that can be closed and opened again, as after a crash."""

    folder: Path
    config: BufferConfig
    sources: Sources
    now: float = 0.0
    requests: int = 0
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.store = Store(self.folder, "test", self.config, self.sources, lambda: self.now)

    def do(self, call: Callable[[Store], Any]) -> Any:
        with self.store.transaction():
            answer = call(self.store)
            self.store.evaluations.write()
        return answer

    def lease(self, count: int = 1, name: str = "server-0", request_id: str | None = None) -> list[Lease]:
        self.requests += 1
        return self.do(lambda s: s.lease(name, request_id or f"request-{self.requests}", count))

    def deliver(self, group: Group) -> bool:
        delivery = decode_delivery(*encode_group(group))
        return self.do(lambda s: s.deliver(delivery))

    def batch(self, index: int) -> Assembled | None:
        return self.do(lambda s: s.batch(index))

    def prompts_of(self, index: int) -> list[str]:
        """Prompt ids of a recorded batch, in order."""
        rows = self.store.database.run(
            "SELECT prompt_id FROM members JOIN groups USING (sequence) WHERE batch = ? ORDER BY place", index
        )
        return [p for (p,) in rows]

    def ledger(self) -> dict[str, str]:
        return dict(self.store.database.run("SELECT prompt_id, state FROM prompts").fetchall())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def group() -> Callable[..., Group]:
    return made_group


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    opened: list[Bench] = []

    def make(
        rows: int = 8, epochs: int | None = 1, eval_rows: int = 0, eval_every: int | None = None, **rules: Any
    ) -> Bench:
        folder = tmp_path / f"run-{len(opened)}"
        folder.mkdir()
        queue = PromptQueue([{"prompt": f"p{i}"} for i in range(rows)], seed=1, epochs=epochs, shuffle=False)
        sources = Sources(queue, [{"prompt": f"e{i}"} for i in range(eval_rows)], eval_every)
        config = BufferConfig(**{"groups_per_batch": 2, "max_staleness": 1, "lease_timeout_s": 10.0, **rules})
        opened.append(Bench(folder, config, sources))
        return opened[-1]

    yield make
    for each in opened:
        each.store.close()
