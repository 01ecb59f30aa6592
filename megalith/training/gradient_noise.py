"""Gradient noise scale (McCandlish et al. 2018, appendix A.1): the batch size above which more samples help little.

The squared norm of a gradient over b samples is |G|² + S / b on average, with the true gradient G and the trace S of
the covariance of a sample's gradient. Norms at two batch sizes give both, and S / |G|² is the noise scale in samples.
The smaller batch consists of the first micro-batches of the step. Its gradient takes an additional forward and backward
pass.
"""

from __future__ import annotations

from torch import Tensor


def noise_scale(small_squares: float, large_squares: float, small: int, large: int) -> dict[str, float]:
    """Return the estimates of one step, by metric name.

    Single estimates are noisy: average trace and squared norm over many steps, and then divide.

    Args:
        small_squares: squared norm of the mean gradient over the smaller batch.
        large_squares: squared norm over the larger batch.
        small: samples of the smaller batch.
        large: samples of the larger batch.
    """
    norm = (large * large_squares - small * small_squares) / (large - small)
    trace = (small_squares - large_squares) / (1 / small - 1 / large)
    return {
        "gradient_noise/trace": trace,
        "gradient_noise/squared_norm": norm,
        "gradient_noise/scale": trace / norm if norm else float("nan"),
    }


def read_noise(small_squares: Tensor, large_norm: Tensor, small: int, large: int) -> dict[str, float]:
    """Return the result of `noise_scale` for gradient norms on a device. Waits for the device.

    Args:
        small_squares: float32 scalar, as in `noise_scale`.
        large_norm: float32 scalar, norm over the larger batch.
        small: samples of the smaller batch.
        large: samples of the larger batch.
    """
    return noise_scale(small_squares.item(), large_norm.item() ** 2, small, large)
