"""Where the parts of a run live: in this process, or on a cluster."""
