"""Simulated training runs: the real schedules in virtual time, with engines and a trainer that only take time."""
