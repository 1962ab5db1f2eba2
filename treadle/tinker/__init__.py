"""Tinker API: the HTTP verbs of the `tinker` client package, over one model of treadle's."""
