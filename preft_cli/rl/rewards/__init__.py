"""What judges answers: one module a reward, and how they add up."""
