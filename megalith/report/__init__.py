"""What a run says of itself: console, metrics, trackers, plots, measured steps."""
