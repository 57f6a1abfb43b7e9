"""The learner: Megatron ranks that take batches, update the policy, publish it and checkpoint it."""
