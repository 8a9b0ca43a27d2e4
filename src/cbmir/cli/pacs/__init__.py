"""`cbmir pacs`: a PACS's side of cbmir. DICOM in, standard results out."""
