"""`python -m treadle.process`: a process that a launcher started, never by hand."""

import sys

from treadle.process.child_main import main

main(sys.argv[1:])
