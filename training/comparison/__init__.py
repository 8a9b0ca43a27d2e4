"""The paper's comparison of methods, on NIH, CheXpert or any table.

`protocols` selects the images that train and query, `plan` lists the cells (a method on one selection), `cells` runs
one, and `runner` runs all of them, each in its own process. `results` turns the answers into numbers, `figures` draws
them, and `report` writes them.
"""
