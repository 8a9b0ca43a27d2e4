"""The paper's comparison of methods, on NIH, CheXpert or any table.

`protocols` say which images train and ask, `plan` which cells there are (a method on one selection); `cells` runs one,
`runner` all of them, each in a process of its own. `results` turns the answers into numbers, which `figures` draws and
`report` writes down.
"""
