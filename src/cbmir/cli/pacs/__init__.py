"""`cbmir pacs`: analyse the radiographs of a PACS, and return results as DICOM or FHIR."""
