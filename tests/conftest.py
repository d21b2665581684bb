"""For all tests: threads that wait politely, since an engine and its reference share the cores."""

from preft_cli.threads import wait_politely

wait_politely()
