"""Training: dataset readers and phantoms, losses, encoders, the Lightning harness, metrics.

Import the modules one by one: readers, phantoms and metrics must work without torch.
"""
