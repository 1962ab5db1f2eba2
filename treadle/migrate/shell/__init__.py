"""Launch scripts in bash, read without running them."""
