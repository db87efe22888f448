"""Whether the probabilities of a classifier are right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def calibration(
    confidence: Sequence[float], correct: Sequence[bool], bins: int = 10
) -> tuple[float, list[dict[str, float]]]:
    """The expected calibration error, and for each bin that has examples the numbers behind it.

    Source: Guo et al. 2017, *On Calibration of Modern Neural Networks*, equations 2 to 5; bin m holds confidences in
    ((m - 1) / bins, m / bins].

    Args:
        confidence: the probability of the predicted class of each example, from 0 to 1.
        correct: whether the prediction is right.

    Example:
        >>> calibration([0.9, 0.9, 0.6, 0.6], [True, True, True, False])[0]
        0.1
    """
    confidences, right = np.asarray(confidence, np.float64), np.asarray(correct, bool)
    bin_of = np.clip(np.ceil(confidences * bins).astype(int) - 1, 0, bins - 1)
    error, by_bin = 0.0, []
    for number in range(bins):
        inside = bin_of == number
        if not inside.any():
            continue
        accuracy, mean = float(right[inside].mean()), float(confidences[inside].mean())
        error += inside.mean() * abs(accuracy - mean)
        by_bin.append({"from": number / bins, "examples": int(inside.sum()), "confidence": mean, "accuracy": accuracy})
    return round(float(error), 12), by_bin
