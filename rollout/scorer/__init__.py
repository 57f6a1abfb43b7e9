"""The scorer: a service of its own that serves one learned reward model to all rollout servers of a run."""
