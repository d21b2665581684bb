"""For all tests: threads that wait politely, since an engine and its reference share the cores; and a Ctrl-C that works.

Shells start background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C would then test nothing.
"""

import signal

from preft_cli.threads import wait_politely

wait_politely()
signal.signal(signal.SIGINT, signal.default_int_handler)
