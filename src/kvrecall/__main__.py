"""``python -m kvrecall``: the ``kvrecall`` command."""

from kvrecall.cli import main

if __name__ == "__main__":
    main()
