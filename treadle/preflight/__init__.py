"""Preflight: everything about a run that can be known without running it, in one report."""
