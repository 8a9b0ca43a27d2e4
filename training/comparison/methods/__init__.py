"""The compared methods: `registry` lists them all; the other files implement those that do not train a network."""
