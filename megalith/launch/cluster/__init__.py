"""Job files of clusters, written as text: Slurm's and Kubernetes'."""
