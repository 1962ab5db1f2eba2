"""Session gateway: agent programs speak OpenAI's or Anthropic's API to the model that trains, with exact tokens."""
