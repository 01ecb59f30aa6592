"""Output of a training run: console, metrics, trackers, reports and plots."""
