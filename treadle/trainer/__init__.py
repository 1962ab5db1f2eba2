"""Training: one step, one rollout buffer, three schedules, one validation path."""
