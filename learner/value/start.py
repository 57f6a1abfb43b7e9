"""What a value model on ranks of its own must agree with the learner on, in one fingerprint."""

import hashlib
import json

from buffer.experiment import ModelConfig
from learner.config import LearnerExperiment
from learner.reference.fingerprint import DIGEST_BYTES, fingerprint


def weights_of_value(path: str, policy: ModelConfig) -> str:
    """Fingerprint of the weights that a value model starts from, and its adapters lie on.

    Raises:
        ValueError: They cannot be read.
    """
    return fingerprint(ModelConfig(path=path, dtype=policy.dtype), None)


def start_of_value(experiment: LearnerExperiment) -> str:
    """Of the weights that it starts from and of the settings that it is trained by, wherever its ranks are.

    Raises:
        ValueError: The weights cannot be read.
    """
    learner, of = experiment.learner, experiment.learner.value
    assert of is not None
    weights = weights_of_value(of.path, experiment.model)
    settings = of.model_dump(mode="json", exclude={"path", "ranks"})
    told = json.dumps([weights, experiment.seed, learner.steps, learner.recompute, settings], sort_keys=True)
    return hashlib.blake2b(told.encode(), digest_size=DIGEST_BYTES).hexdigest()
