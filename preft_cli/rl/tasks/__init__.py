"""Where problems come from: data rows, or the environments of reasoning-gym."""
