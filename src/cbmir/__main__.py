"""`python -m cbmir` runs the command `cbmir`."""

from cbmir.cli import main

if __name__ == "__main__":
    main()
