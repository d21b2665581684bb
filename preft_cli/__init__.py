"""The `preft` command line: train, convert, serve and measure prefill-only adapters."""

__version__ = "0.1.0"
