"""Offline prediction: completions of many prompts into a JSONL file, in the prompts' order, resumable.

Line i of the output belongs to row i of the data, so the number of whole lines in it says where a restart
goes on. Beside the output lies `<output>.settings.json`, what its lines were made with.
"""

import asyncio
import fcntl
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer.examples import BadRow
from buffer.rendering import PromptRefused, Renderer
from rollout.engine import Completion, Engine, Request, gravest
from rollout.episodes import answered
from rollout.groups import Rewards, SamplingPlan
from rollout.total_reward import Answer

Row = dict[str, Any]
Line = dict[str, Any]

NOT_TOLD = "not told"
"""Of a setting that is not there."""


class Predictor:
    """Samples the completions of one row, and scores them where there are rewards.

    Args:
        engine: Started; serves one set of weights, labelled version 0.
        renderer: Makes a prompt's token ids.
        plan: How many completions, at which temperature, how long.
        rewards: None leaves completions without.
        episode: Where the user's function of several turns is; None asks for one reply.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        plan: SamplingPlan,
        rewards: Rewards | None,
        episode: str | None = None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._plan = plan
        self._rewards = rewards
        self._episode = episode

    async def line(self, number: int, row: Row) -> Line:
        """What is written of row `number`: the row, and its completions or why it has none.

        Raises:
            CompletionFailed: A completion could not be made or scored.
            EngineFailed: The engine is gone.
        """
        try:
            if self._rewards is not None:
                self._rewards.check(row)
            prompt_ids = self._renderer.render(row, self._plan.max_tokens)
            made = await self._completions(number, prompt_ids, row)
        except PromptRefused as refused:
            return {"number": number, "row": row, "refused": str(refused), "completions": []}
        return {"number": number, "row": row, "prompt_tokens": len(prompt_ids), "completions": made}

    async def _completions(self, number: int, prompt_ids: list[int], row: Row) -> list[Line]:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._completion(f"{number}/{i}", prompt_ids, row))
                    for i in range(self._plan.samples)
                ]
        except BaseExceptionGroup as failures:
            raise gravest(failures) from failures
        return [task.result() for task in running]

    async def _completion(self, request_id: str, prompt_ids: list[int], row: Row) -> Line:
        plan = self._plan

        async def sample(ids: list[int], turn: int) -> Completion:
            place = f"{request_id}/{turn}" if turn else request_id
            room = min(plan.max_tokens, self._renderer.room(len(ids)))
            return await self._engine.generate(
                Request(place, ids, room, plan.temperature, 0, plan.top_p, plan.top_k)
            )

        completion, played, spoken = await answered(self._episode, row, prompt_ids, sample, self._renderer)
        told: Line = {
            "text": completion.text,
            "tokens": int(completion.sampled_mask.sum()),
            "finish_reason": completion.finish_reason,
            "logprob": round(float(completion.logprobs.sum()), 6),
        }
        if spoken:
            told |= {"turns": completion.turns, "conversation": spoken}
        if self._rewards is not None:
            total = await self._rewards.score(Answer(played, prompt_ids, completion))
            told |= {"reward": total.reward, "reward_parts": total.parts}
        return told


@dataclass(frozen=True, slots=True)
class Output:
    """The file that lines are appended to.

    Args:
        path: Made with its folders where it is missing.
        settings: Whatever the lines depend on, plain JSON.
    """

    path: Path
    settings: dict[str, Any]

    @property
    def _beside(self) -> Path:
        return self.path.with_name(self.path.name + ".settings.json")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other process from writing to it: each would add all lines that are missing.

        Raises:
            ValueError: One is at work there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._beside.open("a") as file:
            os.register_at_fork(after_in_child=file.close)  # what an engine leaves behind holds nothing
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path}: another process is writing it; wait for its end, or write to another"
                ) from None
            try:
                yield
            finally:
                if os.fstat(file.fileno()).st_size == 0:  # nothing was begun
                    self._beside.unlink(missing_ok=True)

    def begin(self) -> int:
        """How many rows are done; what a killed process left of a line is cut off.

        Raises:
            ValueError: The file was made with other settings.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._beside
        told = json.dumps(self.settings, indent=2, sort_keys=True) + "\n"
        if not self.path.exists():
            beside.write_text(told)
            self.path.touch()
            return 0
        if not beside.exists() or not beside.stat().st_size:
            raise ValueError(f"{self.path}: it is there and nothing was generated into it; write to another")
        if other := unlike(_read(beside), json.loads(told)):
            raise ValueError(
                f"{self.path}: holds lines made with other settings: {', '.join(other)}; bring those back, "
                f"remove it and {beside.name}, or write to another"
            )
        return _cut_to_whole_lines(self.path)


def _read(settings: Path) -> dict[str, Any]:
    try:
        found = json.loads(settings.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{settings}: cannot be read: {error}; remove it and the lines beside it") from None
    return found if isinstance(found, dict) else {}


def unlike(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Each setting that differs between two nests of them, as `name old → new`."""
    old, new = _flat(before), _flat(now)
    names = sorted(name for name in old | new if old.get(name, NOT_TOLD) != new.get(name, NOT_TOLD))
    return [f"{name} {_told(old, name)} → {_told(new, name)}" for name in names]


def _flat(settings: dict[str, Any], place: str = "") -> dict[str, Any]:
    """By dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_nest = isinstance(value, dict) and value
        flat |= _flat(value, f"{place}{name}.") if is_nest else {f"{place}{name}": value}
    return flat


def _told(settings: dict[str, Any], name: str) -> str:
    text = json.dumps(settings[name], ensure_ascii=False) if name in settings else NOT_TOLD
    return text if len(text) <= 80 else f"{text[:77]}..."


def _cut_to_whole_lines(path: Path) -> int:
    lines = end = at = 0
    with path.open("r+b") as file:
        while block := file.read(1 << 20):
            lines += block.count(b"\n")
            last = block.rfind(b"\n")
            end = at + last + 1 if last >= 0 else end
            at += len(block)
        file.truncate(end)
    return lines


async def _made(
    make: Callable[[int, Row], Awaitable[Line]], rows: Sequence[Row] | Any, number: int, skip: bool
) -> Line:
    try:
        row = rows[number]
    except BadRow as error:
        if not skip:
            raise
        return {"number": number, "row": None, "refused": f"bad_row: {error}", "completions": []}
    return await make(number, row)


def refused_lines(path: Path) -> int:
    """How many rows of an output got no completions."""
    with path.open(encoding="utf-8") as file:
        return sum("refused" in json.loads(line) for line in file)


async def predict(
    rows: Sequence[Row] | Any,
    output: Output,
    make: Callable[[int, Row], Awaitable[Line]],
    window: int,
    told: Callable[[int, Line], None] = lambda number, line: None,
    skip_bad_rows: bool = False,
) -> None:
    """Write the lines of all rows that are not done yet.

    Consumes: rows, by number.
    Waits for: the oldest row in hand; up to `window` rows are in hand, and what is finished out of turn waits
        for its place in the file.
    Unblocked by: the engine; a cancelled call leaves whole lines, from which the next one goes on.

    Args:
        rows: Anything with a length, and a row at each number.
        output: Where lines go.
        make: The line of a row, such as `Predictor.line`.
        window: Rows in hand.
        told: Called with each line once it is written.
        skip_bad_rows: A row that cannot be read gets a line that says so, and no completions.

    Raises:
        BadRow: A row cannot be read, and is not to be skipped.
        ValueError: The output was made with other settings.
        CompletionFailed, EngineFailed: From `make`.
    """
    first = output.begin()
    pending: deque[tuple[int, asyncio.Future[Line]]] = deque()
    following = first
    try:
        with output.path.open("a", encoding="utf-8") as file:
            while pending or following < len(rows):
                while following < len(rows) and len(pending) < window:
                    made = _made(make, rows, following, skip_bad_rows)
                    pending.append((following, asyncio.ensure_future(made)))
                    following += 1
                number, line = pending[0][0], await pending[0][1]
                pending.popleft()
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                told(number, line)
            os.fsync(file.fileno())
    finally:
        for _, future in pending:
            future.cancel()
        await asyncio.gather(*(future for _, future in pending), return_exceptions=True)
