"""`python -m rankscope` is the `rankscope` command."""

from rankscope.command import main

main()
