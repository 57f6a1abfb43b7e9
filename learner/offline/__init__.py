"""Stages that train on rows of data instead of rollouts: SFT, reward model, DPO."""
