"""`preft train --sweep`: a grid of runs, and what they say together."""
