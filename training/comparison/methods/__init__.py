"""What is compared: `registry` names every method; the files beside it hold those that train no network."""
