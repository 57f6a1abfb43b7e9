"""The rollout server: one vLLM engine that takes prompts on lease, generates, scores and returns groups."""
