"""Loading Hugging Face models and tokenizers, and the attention they run with; shared by engine and policy."""
