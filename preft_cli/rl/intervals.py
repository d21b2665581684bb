"""95% intervals of shares of right answers, and of the difference of two shares on the same problems."""

from __future__ import annotations

import math

Z = 1.959963984540054
"""Of the normal distribution, 95% lie within so many standard deviations."""


def wilson(right: int, total: int) -> tuple[float, float]:
    """Wilson's score interval of `right / total`: inside [0, 1], and of some width also at 0 and 1.

    Wilson, J. Am. Stat. Assoc. 22 (1927) 209; Newcombe, Stat. Med. 17 (1998) 857, method 3.
    """
    share, square = right / total, Z * Z / total
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square * square / 4) / (1 + square)
    # At the ends the bound is the share itself, which rounding would miss by 1e-17.
    return (0.0 if right == 0 else centre - half), (1.0 if right == total else centre + half)


def paired_difference(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """The interval of (share of the first) - (share of the second), from problems solved by both, by one alone, by neither.

    Newcombe, Stat. Med. 17 (1998) 2635, method 10: the two Wilson intervals, squared and added, less what the two measurements
    have in common. Good also where few problems, or none, are solved by one alone; the usual formula then gives a width of 0.
    """
    total = both + first + second + neither
    one, other = both + first, both + second
    share_1, share_2 = one / total, other / total
    low_1, high_1 = wilson(one, total)
    low_2, high_2 = wilson(other, total)
    phi = _correlation(both, first, second, neither)

    def width(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    difference = share_1 - share_2
    low = difference - width(share_1 - low_1, high_2 - share_2)
    return low, difference + width(high_1 - share_1, share_2 - low_2)


def _correlation(both: int, first: int, second: int, neither: int) -> float:
    """Of the two measurements, with Newcombe's correction for continuity where it is above 0."""
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    product = float(both * neither - first * second)
    if product > 0:
        product = max(product - (both + first + second + neither) / 2, 0.0)
    return product / math.sqrt(margins) if margins else 0.0
