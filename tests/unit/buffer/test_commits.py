"""Group commit over a real file: what an answer says is on disk, and a fault answers nobody."""

import asyncio

from buffer.commits import Commits
from buffer.database import read_only
from buffer.errors import RunFinished


def test_an_answer_comes_when_a_second_connection_can_read_what_it_says(bench):
    b = bench()
    reader = read_only(b.folder / "buffer.sqlite")

    async def go():
        commits = Commits(b.store)
        running = asyncio.create_task(commits.run())
        seen = []
        for version in range(20):
            await commits.submit(lambda s, v=version: s.published(v))
            seen.append(reader.execute("SELECT value FROM facts WHERE name = 'published'").fetchone())
        running.cancel()
        await asyncio.wait([running])
        commits.close()
        return seen

    assert asyncio.run(go()) == [(version,) for version in range(20)]
    reader.close()


def test_a_refusal_is_an_answer_of_its_own_and_a_fault_undoes_the_whole_transaction(bench):
    b = bench()

    def refuse(store):
        raise RunFinished("over")

    def fail(store):
        raise ZeroDivisionError

    async def go():
        commits = Commits(b.store)
        running = asyncio.create_task(commits.run())
        # Submitted together, they share a transaction.
        kept = asyncio.gather(
            commits.submit(lambda s: s.published(3)), commits.submit(refuse), return_exceptions=True
        )
        outcomes = await kept
        lost = asyncio.gather(commits.submit(lambda s: s.published(4)), commits.submit(fail))
        await asyncio.wait([running], timeout=5)
        answered = lost.done()
        lost.cancel()
        commits.close()
        return outcomes, answered, running.exception()

    outcomes, answered, fault = asyncio.run(go())
    assert outcomes[0] is None
    assert isinstance(outcomes[1], RunFinished)
    assert isinstance(fault, ZeroDivisionError)
    assert not answered
    assert b.store.database.fact("published") == 3
