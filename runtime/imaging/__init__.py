"""From a PNG, JPEG, TIFF or DICOM file to the grey image that a model needs, in training and at run time."""
