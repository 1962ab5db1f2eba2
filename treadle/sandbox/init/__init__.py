"""Init of a box: runs inside it, where treadle is not installed.

The folder is shown to the box as it is, and imports nothing but itself and four modules of the standard library; so it
starts in milliseconds and needs no package. `server` is what runs.
"""
