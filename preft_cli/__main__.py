"""`python -m preft_cli` is `preft`."""

from preft_cli.app import main

main()
