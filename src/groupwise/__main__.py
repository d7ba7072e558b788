"""``python -m groupwise`` is the command ``groupwise``."""

from groupwise.cli import main

if __name__ == "__main__":
    main()
