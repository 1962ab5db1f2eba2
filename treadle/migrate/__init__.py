"""Migration from verl: its YAML files and launch scripts as configs of ours, key by key."""
