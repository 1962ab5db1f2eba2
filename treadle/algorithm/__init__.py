"""Algorithm: from trajectories to gradients, as pure functions on tensors."""
