"""Where answers are sampled."""
