"""The paper's comparison of methods, on NIH, CheXpert or any table.

`protocols` say which images train and ask, `plan` which cells there are (a method on one selection), `running` runs
them, each in a process of its own by `cells`, and `answers` is what one leaves. `statistics` and `results` turn that
into figures, which `pictures` draw and `report` writes down.
"""
