"""From trajectories to gradients: pure functions on tensors."""
