"""Reinforcement learning with verifiable rewards: GRPO, with answers sampled by the engine that serves the adapter."""
