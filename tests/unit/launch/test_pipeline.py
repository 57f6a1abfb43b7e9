"""A pipeline's file, and the order and ends of its stages; the stages' commands are scripts here."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from buffer.ctrl_c import EXIT_INTERRUPTED
from buffer.experiment import ConfigError, load
from launch import pipeline
from launch.experiment import WholeExperiment, reward_models
from learner.offline.config import OfflineExperiment
from rollout.config import PredictionExperiment

PIPELINE = """
name: chat
run_dir: {run_dir}
stages:
  - {{name: first, command: run, config: experiment.yaml}}
  - name: second
    command: run
    config: experiment.yaml
    overrides: {{model.path: "{{first}}", learner.steps: 7}}
"""


@pytest.fixture
def pipeline_file(config_file, tmp_path):
    path = config_file.parent / "pipeline.yaml"
    path.write_text(PIPELINE.format(run_dir=tmp_path / "all").replace("experiment.yaml", config_file.name))
    return path


def test_a_stage_starts_from_the_model_that_an_earlier_one_writes(pipeline_file, tmp_path):
    first, second = pipeline.read(pipeline_file, [])
    assert first.run_dir == tmp_path / "all" / "first"
    assert f'model.path="{tmp_path}/all/first/model"' in second.overrides
    assert "learner.steps=7" in second.overrides
    assert 'name="chat-second"' in second.overrides
    assert second.command[1:4] == ["-m", "launch", "run"]


def test_braces_that_name_no_stage_stay_as_they_are(pipeline_file):
    text = pipeline_file.read_text()
    template = "{{ messages }} {'a': {}} {{first}}"
    pipeline_file.write_text(text.replace("learner.steps: 7", f'data.template: "{template}"'))
    given = pipeline.open_file(pipeline_file, [])
    assert f'data.template="{template}"' in pipeline.Stage(given, 1, pipeline_file.parent).overrides


def test_every_stage_is_checked_before_the_first_one_starts(pipeline_file):
    text = pipeline_file.read_text()
    long = "rollout.sampling.max_tokens: 128"
    pipeline_file.write_text(text.replace("learner.steps: 7", f"learner.stepz: 7, {long}"))
    with pytest.raises(ConfigError, match=r"stage second: .*learner\.stepz: unknown key; did you mean steps"):
        pipeline.read(pipeline_file, [])
    pipeline_file.write_text(text.replace("learner.steps: 7", long))
    with pytest.raises(ConfigError, match=r"stage second: .*max_tokens=128 leaves no room for a prompt"):
        pipeline.read(pipeline_file, [])


def test_a_stage_whose_file_is_of_another_kind_is_told(pipeline_file):
    sft = Path(__file__).parents[3] / "configs/sft.yaml"
    text = pipeline_file.read_text().replace(
        "command: run, config: experiment.yaml", f"command: dpo, config: {sft}"
    )
    pipeline_file.write_text(text)
    with pytest.raises(ConfigError, match=r"stage first: .*stage\.kind is sft; run it with `slipstream sft`"):
        pipeline.read(pipeline_file, [])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("{first}", "{secnd}", r"stage second: overrides: '\{secnd\}': .*earlier stages: first"),
        ("name: second", "name: first", "two stages have the same name"),
        ("command: run", "command: walk", "stages.0.command"),
        ("stages:", "stagez:", "stagez: unknown section; did you mean stages"),
    ],
)
def test_a_mistake_in_the_pipeline_is_one_line(pipeline_file, old, new, reason):
    pipeline_file.write_text(pipeline_file.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=reason):
        pipeline.read(pipeline_file, [])


STAGES = """
name: chat
run_dir: {run_dir}
stages:
  - {{name: sft, command: sft, config: {sft}}}
  - {{name: reward, command: reward, config: {reward}, overrides: {{model.path: "{{sft}}"}}}}
  - {{name: dpo, command: dpo, config: {dpo}, overrides: {{model.path: "{{sft}}"}}}}
  - name: rl
    command: run
    config: {judged}
    overrides: {{model.path: "{{dpo}}", rollout.rewards.helpful.model: "{{reward}}"}}
"""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("", "", None),
        ('model.path: "{dpo}"', 'model.path: "{reward}"',
         r"stage rl: model\.path: the stage reward writes a reward model; expected a language model"),
        ('helpful.model: "{reward}"', 'helpful.model: "{sft}"',
         r"stage rl: .*helpful\.model: the stage sft writes a language model; expected a reward model"),
        ('D, overrides: {', 'D, overrides: {learner.checkpoint.export: false, ',
         r"stage rl: model\.path: the stage dpo writes no model, by its learner\.checkpoint\.export=false"),
        ('D, overrides: {', 'D, overrides: {run_dir: elsewhere, ',
         r"stages\.2\.overrides: run_dir is what the pipeline gives each stage"),
    ],
    ids=["good", "reward-as-policy", "policy-as-reward", "not-exported", "elsewhere"],
)  # fmt: skip
def test_what_a_stage_is_handed_is_known_before_the_first_one_starts(tmp_path, old, new, reason):
    """Otherwise hours later; or never, where an earlier run left another model at the place."""
    configs = Path(__file__).parents[3] / "configs"
    files = {name: configs / f"{name}.yaml" for name in ("sft", "reward", "dpo", "judged")}
    text = STAGES.format(run_dir=tmp_path, **files)
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        text.replace(old.replace("D,", f"{files['dpo']},"), new.replace("D,", f"{files['dpo']},"))
    )
    if reason is None:
        assert [stage.config.name for stage in pipeline.read(path, [])] == ["sft", "reward", "dpo", "rl"]
        return
    with pytest.raises(ConfigError, match=reason):
        pipeline.read(path, [])


class Scripted:
    """A stage whose command notes that it ran and ends with a code."""

    def __init__(self, name, log, code):
        self.config = type("Config", (), {"name": name})
        told = f"open({str(log)!r}, 'a').write({name!r} + ' '); raise SystemExit({code})"
        self.command = [sys.executable, "-c", told]


@pytest.mark.parametrize(("codes", "ran", "code"), [((0, 0), "a b ", 0), ((3, 0), "a ", 3)])
def test_a_stage_that_does_not_end_well_ends_the_pipeline(tmp_path, capsys, codes, ran, code):
    log = tmp_path / "log"
    stages = [Scripted(name, log, code) for name, code in zip("ab", codes, strict=True)]
    assert pipeline.run(stages, "slipstream pipeline p.yaml", Console()) == code
    assert log.read_text() == ran
    told = capsys.readouterr().out
    assert ("the pipeline ends here: stage 1 of 2, a, is not finished" in told) == (code != 0)


def test_a_stage_names_the_pipelines_command_as_the_one_to_go_on_with(tmp_path):
    stage = Scripted("a", tmp_path / "log", 0)
    asks = "import sys; from launch.command_line import typed; open(sys.argv[1], 'w').write(typed())"
    stage.command = [sys.executable, "-c", asks, str(tmp_path / "log")]
    assert pipeline.run([stage], "slipstream pipeline p.yaml", Console()) == 0
    assert (tmp_path / "log").read_text() == "slipstream pipeline p.yaml"


def test_ctrl_c_while_python_comes_up_for_a_stage_waits_until_the_stage_can_take_it(tmp_path):
    """A shell that is interrupted before the stage's interpreter is up, as from a terminal."""
    stage = Scripted("a", tmp_path / "log", 0)
    comes_up = (
        "kill -INT $$; exec {python} -c 'from buffer.ctrl_c import end_at_ctrl_c; {log}; end_at_ctrl_c()'"
    )
    log = f'open("{tmp_path / "log"}", "w").write("up")'
    stage.command = ["sh", "-c", comes_up.format(python=sys.executable, log=log)]
    assert pipeline.run([stage], "slipstream pipeline p.yaml", Console()) == EXIT_INTERRUPTED
    assert (tmp_path / "log").read_text() == "up"


def test_a_killed_stage_is_told_by_its_signal(tmp_path):
    stage = Scripted("a", tmp_path / "log", 0)
    stage.command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert pipeline.run([stage], "again", Console()) == 128 + 9


@pytest.mark.parametrize("name", ["pipeline", "tutorial"])
def test_the_examples_hand_each_stage_what_it_starts_from(name):
    path = Path(__file__).parents[3] / f"configs/{name}.yaml"
    sft, reward, rl, scores = pipeline.read(path, [])
    assert [s.config.command for s in (sft, reward, rl, scores)] == ["sft", "reward", "run", "evaluate"]
    assert load(reward.file, reward.overrides, OfflineExperiment).model.path == str(sft.model)
    experiment = load(rl.file, rl.overrides, WholeExperiment)
    assert experiment.model.path == str(sft.model)
    assert {n: r.model for n, r in reward_models(experiment).items()} == {"helpful": str(reward.model)}
    assert load(scores.file, scores.overrides, PredictionExperiment).model.path == str(rl.model)
