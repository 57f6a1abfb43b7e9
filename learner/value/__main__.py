"""`torchrun -m learner.value CONFIG [key=value …]`: ranks of its own for PPO's value model."""

from buffer.ctrl_c import end_at_ctrl_c


def main() -> None:
    end_at_ctrl_c()
    from learner.commandline import start
    from learner.config import LearnerExperiment

    experiment = start("python -m learner.value", __doc__, LearnerExperiment)
    # After the configuration is known to be right: this imports torch and Megatron.
    from learner.value.service import run

    run(experiment)


if __name__ == "__main__":
    main()
