"""Weight sync: a version's tensors from the learner to every rollout server, in checked buckets.

Knows nothing of reinforcement learning.
"""
