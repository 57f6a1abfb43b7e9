"""What the model can take of a group. A group beyond that would end every learner that trains it."""

import json
from dataclasses import dataclass
from pathlib import Path

from buffer.errors import BadMessage
from buffer.experiment import ModelConfig
from buffer.records import Group


@dataclass(frozen=True, slots=True)
class Bounds:
    """None where it is not known."""

    max_length: int | None = None
    """Of a trajectory, tokens."""
    vocabulary: int | None = None
    """Token ids lie below it."""

    def check(self, group: Group) -> None:
        """
        Raises:
            BadMessage: Which trajectory is beyond, and of what.
        """
        for number, trajectory in enumerate(group.trajectories):
            where, length = f"trajectories[{number}]", len(trajectory.token_ids)
            if self.max_length is not None and length > self.max_length:
                raise BadMessage(f"{where}: {length} tokens; model.max_length is {self.max_length}")
            highest = int(trajectory.token_ids.max())
            if self.vocabulary is not None and highest >= self.vocabulary:
                raise BadMessage(
                    f"{where}.token_ids: expected 0 to {self.vocabulary - 1}, as the model's config.json "
                    f"says, got {highest}"
                )


def bounds_of(model: ModelConfig | None) -> Bounds:
    """Of a section `model`. A buffer may have none, or not the folder that it names."""
    if model is None:
        return Bounds()
    try:
        config = json.loads((Path(model.path) / "config.json").read_text())
        found = config["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Bounds(model.max_length)  # what is wrong with it is for the learner to tell
    whole = isinstance(found, int) and not isinstance(found, bool) and found > 0
    return Bounds(model.max_length, found if whole else None)
