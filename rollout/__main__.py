"""`python -m rollout CONFIG [--name server-0] [key=value …]`: one rollout server."""

from buffer.ctrl_c import end_at_ctrl_c


def main() -> None:
    end_at_ctrl_c()
    from rollout.commandline import start

    experiment, name = start("python -m rollout", __doc__, "unique among the servers of the run", "server-0")
    # After the configuration is known to be right: this imports the engine's world.
    from rollout.service import run

    run(experiment, name)


if __name__ == "__main__":
    main()
