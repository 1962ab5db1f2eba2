"""Engines: whatever turns prompt ids into completions, and the router in front of several."""
