"""The compared methods: `registry` names all of them; the other files hold those that train no network."""
