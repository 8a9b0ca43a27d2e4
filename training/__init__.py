"""Training: dataset readers and phantoms, losses, encoders, the Lightning harness, metrics.

Import submodules directly: readers, phantoms and metrics must work without torch.
"""
