"""`preft doctor`: facts about this machine, checks of those facts, and a remedy for each failure."""
