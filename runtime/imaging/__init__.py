"""From a file to the grey image that a model takes: PNG, JPEG, TIFF and DICOM, in training and at run time."""
