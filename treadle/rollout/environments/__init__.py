"""Environments of other packages, by scheme: `textarena:`, `gem:`, `skyrl_gym:`, `openenv:`, `gymnasium:`.

Each adapter is one file of the standard library alone, which imports its package inside its functions. So it runs in
this interpreter, or in another one that has the package (`rollout.multi_turn.environment_python`), and returns maps
with the fields of `Opening` and `Step`. It has a class, built with the name after the colon and the
`environment_kwargs`, and `check(name)`, which raises LookupError where there is no such environment.
"""
