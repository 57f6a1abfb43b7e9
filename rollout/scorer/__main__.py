"""`python -m rollout.scorer CONFIG --name REWARD [key=value …]`: the scorer of one reward model."""

from rollout.commandline import start


def main() -> None:
    experiment, name = start("python -m rollout.scorer", __doc__, "of a model in rollout.rewards", None)
    # After the configuration is known to be right: this imports the engine's world.
    from rollout.scorer.service import run

    run(experiment, name)


if __name__ == "__main__":
    main()
