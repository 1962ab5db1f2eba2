"""Training: one step, three schedules, one validation path."""
