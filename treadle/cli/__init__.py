"""The `treadle` command. Parses first and imports later, so that help and config errors come at once."""
