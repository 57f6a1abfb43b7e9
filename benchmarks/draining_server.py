"""`python -m rollout` whose engine ends what it runs before it takes a version, for in_flight_update.py.

What is asked of it meanwhile waits. The product has no such setting: `rollout.on_update` says what is done in
its place.
"""

from rollout.vllm_engine import VLLMEngine


class DrainingEngine(VLLMEngine):
    async def start(self) -> None:
        await super().start()
        from sync.errors import LoadFailed
        from sync.vllm_sink import VllmSink

        class DrainingSink(VllmSink):
            async def _pause(self) -> None:
                drained = self._engine.pause_generation(mode="wait", clear_cache=False)
                await self._call(drained, LoadFailed)

        self._sink = DrainingSink(self.llm)


if __name__ == "__main__":
    import rollout.vllm_engine

    rollout.vllm_engine.VLLMEngine = DrainingEngine
    from rollout.__main__ import main

    main()
