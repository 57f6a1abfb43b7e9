"""`python -m rollout.scorer CONFIG --name REWARD [key=value …]`: the scorer of one reward model."""

from buffer.ctrl_c import end_at_ctrl_c


def main() -> None:
    end_at_ctrl_c()
    from rollout.commandline import start

    experiment, name = start("python -m rollout.scorer", __doc__, "of a model in rollout.rewards", None)
    # After the configuration is known to be right: this imports the engine's world.
    from rollout.scorer.service import run

    run(experiment, name)


if __name__ == "__main__":
    main()
