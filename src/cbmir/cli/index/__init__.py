"""`cbmir index`: build a gallery, keep it, and look after it."""
