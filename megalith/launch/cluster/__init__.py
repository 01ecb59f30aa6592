"""Job files for Slurm and Kubernetes."""
