"""Prefill-only adapters in vLLM: a plugin, not a fork.

Read in this order: `rule.py` (the idea), `plugin.py` (what is put into vLLM), `runners/`, `kernels/`, `pool/`
(where adapters are), `readiness.py`, `directory.py`, `frontend.py`, `server.py`. Nothing here imports the command line.
"""
