"""Statistics of timings, standard library only: the median with its interval, paired speedups, verdicts.

A confidence interval of one run says how noisy the run was; it does not say how much another process would differ.
"""

import math
from dataclasses import asdict, dataclass
from functools import lru_cache

CONFIDENCE = 0.95
DEFAULT_THRESHOLD = 0.02
VERDICTS = ("FASTER", "SLOWER", "SAME", "UNCLEAR")


@dataclass(frozen=True)
class Summary:
    """Samples in ms. ci95 is of the median; outliers lie outside of Tukey's fences and are counted, never dropped."""

    median: float
    ci95: tuple[float, float]
    min: float
    mean: float
    max: float
    p10: float
    p90: float
    iqr_rel: float
    n: int
    outliers: int

    @property
    def ci_rel(self) -> float:
        """Half-width of the interval over the median."""
        return (self.ci95[1] - self.ci95[0]) / 2 / self.median if self.median else 0.0

    def to_json(self) -> dict:
        return {**asdict(self), "ci95": list(self.ci95)}

    @classmethod
    def from_json(cls, found: dict) -> "Summary":
        return cls(**found | {"ci95": tuple(found["ci95"])})


@dataclass(frozen=True)
class Speedup:
    """How many times as fast a candidate is as a baseline: the median of the rounds' ratios and its 95% interval."""

    ratio: float
    ci95: tuple[float, float]
    verdict: str
    rounds: int

    def to_json(self) -> dict:
        return {**asdict(self), "ci95": list(self.ci95)}


def quantile(ordered, fraction: float) -> float:
    """Quantile of sorted values, linear between neighbours."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@lru_cache(maxsize=1024)
def _interval_rank(n: int) -> int:
    """Largest k with 95% probability that the median lies between the k-th smallest and k-th largest sample, from 0.

    Each sample is below the median with probability 1/2, so the number below is binomial, whatever the distribution. With
    fewer than 6 samples even the extremes hold the median with less than 95%.
    """
    if n > 400:
        # The normal approximation agrees to a rank here.
        return math.floor(n / 2 - 0.98 * math.sqrt(n) - 0.5)
    k, tail = -1, 1
    while 2 * tail <= (1 - CONFIDENCE) * 2**n:
        k += 1
        tail += math.comb(n, k + 1)
    return max(0, k)


def median_ci(samples) -> tuple[float, float, float]:
    """(median, low, high): the median and its 95% order-statistic interval."""
    ordered = sorted(samples)
    k = _interval_rank(len(ordered))
    return quantile(ordered, 0.5), ordered[k], ordered[-1 - k]


def summary(samples) -> Summary:
    """Summary of a non-empty sequence of times."""
    ordered = sorted(samples)
    median, low, high = median_ci(ordered)
    q1, q3 = quantile(ordered, 0.25), quantile(ordered, 0.75)
    fence = 1.5 * (q3 - q1)
    return Summary(
        median=median, ci95=(low, high), min=ordered[0], mean=math.fsum(ordered) / len(ordered), max=ordered[-1],
        p10=quantile(ordered, 0.1), p90=quantile(ordered, 0.9), iqr_rel=(q3 - q1) / median if median else 0.0,
        n=len(ordered), outliers=sum(not q1 - fence <= x <= q3 + fence for x in ordered),
    )  # fmt: skip


def verdict(ratio: float, low: float, high: float, threshold: float = DEFAULT_THRESHOLD) -> str:
    """FASTER or SLOWER: the interval excludes 1 and the ratio is beyond the threshold. SAME: the ratio is within the
    threshold, the interval within twice that. UNCLEAR: anything else, the samples don't tell."""
    ratio, low, high = math.log(ratio), math.log(low), math.log(high)
    limit = math.log(1 + threshold)
    if low > 0 and ratio > limit:
        return "FASTER"
    if high < 0 and ratio < -limit:
        return "SLOWER"
    if abs(ratio) <= limit and max(abs(low), abs(high)) <= 2 * limit:
        return "SAME"
    return "UNCLEAR"


def speedup(baseline_ms, candidate_ms, threshold: float = DEFAULT_THRESHOLD) -> Speedup:
    """Compare two backends measured in the same rounds.

    Args:
        baseline_ms, candidate_ms: one time a round, paired by round: what drifts (clock, heat) cancels in each ratio.
        threshold: ratios within 1 + threshold count as the same.
    """
    logs = [math.log(b / c) for b, c in zip(baseline_ms, candidate_ms, strict=True)]
    ratio, low, high = (math.exp(x) for x in median_ci(logs))
    # Fewer than 6 rounds have no 95% interval: claim nothing.
    word = verdict(ratio, low, high, threshold) if len(logs) >= 6 else "UNCLEAR"
    return Speedup(ratio, (low, high), word, len(logs))


def geomean(values) -> float:
    """Geometric mean of positive numbers."""
    values = list(values)
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def round_by(value: float, half_width: float) -> str:
    """value with as many digits as its uncertainty carries, one more than the first uncertain one, at least 3."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 4 if half_width <= 0 else math.floor(math.log10(abs(value) / half_width)) + 2
    decimals = max(3, min(digits, 5)) - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, decimals)}f}"
