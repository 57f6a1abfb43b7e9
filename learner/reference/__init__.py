"""The frozen initial model: in the learner's own ranks, or a service of its own on ranks of its own."""
