"""`python -m treadle`: the command, where its script is not on the path."""

from treadle.cli.main import main

if __name__ == "__main__":
    main()
