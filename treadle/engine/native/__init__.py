"""Native engine: a Hugging Face decoder in this process. Imports torch; triton only on CUDA."""
