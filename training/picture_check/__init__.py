"""Trains the picture check that comes with the runtime (`cbmir.runtime.imaging.picture_check`).

`python -m cbmir.training.picture_check` trains its network, chooses its thresholds, measures it and writes its file.
`impostors` draws pictures that are not a chest, `views` changes images at random, `network` is the network.
"""
