"""`python -m treadle.cli`: the same as the `treadle` command."""

from treadle.cli.main import main

main()
