"""Models on ranks of their own beside the learner's: what the reference's and the value model's share."""
