"""Discriminative reward models: a decoder with a head that gives a text one number.

    conversation ──► transcript ──► ids ──► batches ──► network, in a thread here or in a process of its own
                                        └─► endpoint, a server that answers /classify

Only `network` imports torch, so a run whose classifiers live in processes or behind servers does not.
"""
