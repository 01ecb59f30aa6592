"""Loss spikes: what a loss is compared with."""

from megalith.config import RunConfig
from megalith.parallel.gather import ALONE
from megalith.report.health import HealthMonitor, ReadStep


def step(number: int, loss: float) -> ReadStep:
    return ReadStep(number, 4 * number, 4, loss, grad_norm=1.0, skipped=False, loss_scale=1.0)


def test_a_loss_is_compared_with_the_mean_of_a_full_window_that_has_accepted_spikes():
    runtime = {"loss_spike_threshold": 2.0, "loss_spike_window": 3}
    monitor = HealthMonitor(RunConfig.from_tree({"runtime": runtime}), ALONE)
    assert monitor.check([step(1, 1.0), step(2, 9.0)]).spike is None
    monitor.rewind_history(1)
    assert monitor.check([step(2, 1.0), step(3, 1.0)]).spike is None
    spike = monitor.check([step(4, 10.0)]).spike
    assert spike == step(4, 10.0)
    monitor.accept_spike(spike)  # the mean of 1, 1 and 10 is 4
    assert monitor.check([step(5, 7.9)]).spike is None
