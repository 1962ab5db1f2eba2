"""An agent with the OpenAI SDK that learns to use the calculator, unmodified, through the gateway."""
