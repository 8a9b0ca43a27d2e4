"""`cbmir index`: build and maintain a gallery."""
