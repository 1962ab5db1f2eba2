"""Offline readers of a run's journal: the timeline drawn, the audit of tasks, the replay of training."""
