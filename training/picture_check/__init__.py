"""Makes the check of the picture itself that the runtime brings with it (`cbmir.runtime.imaging.picture_check`).

`python -m cbmir.training.picture_check` trains its network, chooses its thresholds, measures it and writes its file.
`impostors` draws pictures that are no chest, `views` changes images at random, `network` is what learns.
"""
