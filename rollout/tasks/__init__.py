"""Prompt sources that come with the rollout server, for `data.train: {kind: function}`."""
