"""Random schedules on the real CPU engine, held against the masked reference: `python -m tests.schedules --help`."""
