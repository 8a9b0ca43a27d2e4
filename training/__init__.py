"""Training: dataset readers and phantoms, losses, encoders, the Lightning harness, metrics.

Imported module by module, since readers, phantoms and metrics must work where torch is not installed.
"""
