"""The embedded engine: any Hugging Face decoder, in this process, on the policy's own modules."""
