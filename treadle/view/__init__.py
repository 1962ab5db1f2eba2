"""Local web viewer of runs: `treadle view`. Reads journals and nothing else; writes nothing."""
