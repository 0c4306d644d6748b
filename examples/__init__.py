"""Programs that show lowtide at work; each is run with ``python -m examples.NAME``."""
