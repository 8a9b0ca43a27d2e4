"""Training of the picture check that comes with the runtime (`cbmir.runtime.imaging.picture_check`).

`python -m cbmir.training.picture_check` trains its network, chooses its thresholds, measures it and writes its file.
`impostors` draws pictures that are not chests, `views` varies images at random, `network` trains and exports.
"""
