"""Classifiers: discriminative reward models, a decoder with a head that gives a text one number.

    conversation ──► ClassifierInput ──► ids ──► BatchingThread ──► ClassifierModel, in a thread here or in a process
                                            └─► ClassifierEndpoint, a server that answers /classify (vLLM)

Only `model` imports torch, so a run whose classifiers live in processes or behind servers does not.
"""
