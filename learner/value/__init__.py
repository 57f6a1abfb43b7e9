"""The value model of PPO on ranks of its own: the job, and the learner's end of it."""
