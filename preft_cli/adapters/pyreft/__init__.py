"""Folders that pyreft wrote (Wu et al. 2024, arXiv 2404.03592)."""
