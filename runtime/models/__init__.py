"""Models that come with cbmir, and the names by which commands and `cbmir.load` find them (`catalog`)."""
