"""The tiers that adapters move through: files, host memory, device memory. One `tiers.AdapterTiers` in each worker."""
