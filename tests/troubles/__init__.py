"""What goes wrong for people who use activation checkpointing: one file a section, one test a trouble.

A test is named after its line in the list of troubles (B01, P01, ...) and fails where the trouble is present. Where
PyTorch's own checkpoint shows the trouble, the test shows that as well, on the releases where it was seen.
"""
