"""The command `slipstream`: the way in, for as long as `launch/cli.py` is not imported yet."""

from buffer.ctrl_c import end_at_ctrl_c


def main() -> None:
    end_at_ctrl_c()
    from launch.cli import main

    main()


if __name__ == "__main__":
    main()
