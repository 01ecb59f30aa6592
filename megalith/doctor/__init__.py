"""`megalith doctor`: checks of a machine's software, disk, network and GPUs."""
