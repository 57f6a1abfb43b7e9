"""`torchrun -m learner.offline CONFIG [key=value …]`: a stage's ranks, or one without torchrun."""

from buffer.ctrl_c import end_at_ctrl_c


def main() -> None:
    end_at_ctrl_c()
    from learner.commandline import start
    from learner.offline.config import OfflineExperiment

    experiment = start("python -m learner.offline", __doc__, OfflineExperiment)
    # After the configuration is known to be right: this imports torch and Megatron.
    from learner.offline.service import run

    run(experiment)


if __name__ == "__main__":
    main()
