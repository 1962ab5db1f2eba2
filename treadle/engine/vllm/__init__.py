"""vLLM as an engine: a server process of our own around AsyncLLM, and the client in front of it."""
