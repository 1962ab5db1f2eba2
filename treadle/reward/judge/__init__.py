"""Generative reward models: asked about a trajectory in words, through any engine, and read as a score."""
