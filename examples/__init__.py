"""Examples. A package, so that tests import them although another package has this name too."""
