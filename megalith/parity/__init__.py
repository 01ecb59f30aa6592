"""One training job in many layouts, compared with one process: the promise of layout invariance, kept by measuring."""
