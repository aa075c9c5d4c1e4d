"""``python -m refimpl``: the command line."""

from refimpl.cli import main

if __name__ == "__main__":
    main()
