"""`torchrun -m learner CONFIG [key=value …]`: the learner's ranks, or one without torchrun."""

from buffer.ctrl_c import end_at_ctrl_c


def main() -> None:
    end_at_ctrl_c()
    from learner.commandline import start
    from learner.config import LearnerExperiment

    experiment = start("python -m learner", __doc__, LearnerExperiment)
    # After the configuration is known to be right: this imports torch and Megatron.
    from learner.service import run

    run(experiment)


if __name__ == "__main__":
    main()
