"""The paper's comparison of methods, on NIH, CheXpert or any table.

`protocols` selects the images for training and queries, `plan` lists the cells (one method on one selection), `cells`
runs one of them, and `runner` runs all, each in its own process. `results` computes the numbers, `figures` draws them,
and `report` writes them.
"""
