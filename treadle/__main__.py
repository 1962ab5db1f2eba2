"""`treadle`, and `python -m treadle` where its script is not on the path: the command, once signals are handled."""

from treadle.cli.early_signals import handle_early_signals


def main() -> None:
    """Run the command. Its import takes a moment, in which a signal must end it in order, too."""
    handle_early_signals()
    from treadle.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
