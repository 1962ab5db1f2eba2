"""An agent that learns to use a calculator which does one operation at a time."""
