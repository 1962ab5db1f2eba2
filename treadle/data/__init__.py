"""Data: where tasks come from, and how messages become token ids. Imports no torch and no transformers by itself."""
