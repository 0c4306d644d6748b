"""`python -m lowtide` does what the command `lowtide` does."""

from __future__ import annotations

from lowtide.cli.app import main

if __name__ == "__main__":
    main()
