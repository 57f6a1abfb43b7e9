import asyncio

import pytest

from buffer.client import DataExhausted, RunFinished
from buffer.config import BufferConfig
from buffer.memory import MemoryBuffer


def test_a_whole_run_in_this_process(group):
    async def run():
        config = BufferConfig(groups_per_batch=2, max_staleness=1)
        buffer = MemoryBuffer([{"prompt": f"p{i}"} for i in range(4)], config, epochs=1)
        assert await buffer.lease(4, 0.02) == []
        await buffer.published(0)
        leases = await buffer.lease(4, 0.02)
        assert await buffer.renew([leases[0].lease_id, "other"]) == {"other"}
        waiting = asyncio.create_task(buffer.batch(0, 0, 1, 5.0))
        for lease in leases:
            assert await buffer.deliver(group(lease))
        batch = await waiting
        assert batch is not None
        assert [g.prompt_id for g in batch.groups] == [x.prompt.prompt_id for x in leases[:2]]
        halves = [await buffer.batch(0, rank, 2, 0.0) for rank in (0, 1)]
        assert [len(h.groups) for h in halves if h] == [1, 1]
        await buffer.published(1)
        assert await buffer.batch(1, 0, 1, 0.0) is not None
        with pytest.raises(DataExhausted):
            await buffer.batch(2, 0, 1, 0.0)
        await buffer.committed(2)
        await buffer.finished(2)
        with pytest.raises(RunFinished):
            await buffer.lease(1, 0.0)
        assert (await buffer.status())["trained"] == 4

    asyncio.run(run())
