"""Training runs in virtual time: the real schedules, with engines and a trainer that only take time."""
