"""`python -m coordinator` is the command `coordinator`."""

from coordinator.cli import main

main()
