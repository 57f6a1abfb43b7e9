"""What `slipstream evaluate` refuses before it starts an engine."""

import pytest
from rich.console import Console

from launch import prediction
from rollout.config import PredictionExperiment


def test_an_experiment_without_prompts_to_evaluate_on_leaves_no_folder(tmp_path):
    experiment = PredictionExperiment(name="none", run_dir=str(tmp_path), model={"path": str(tmp_path)})
    with pytest.raises(ValueError, match="the experiment has no `eval` section"):
        prediction.evaluate(experiment, tmp_path / "evaluation", Console())
    assert not (tmp_path / "evaluation").exists()
