"""`cbmir pacs`: cbmir for a PACS: DICOM in, standard results out."""
