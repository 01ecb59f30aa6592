#!/bin/sh
# Prints the Slurm batch file of llama3_70b.yaml on eight machines; with --submit it is handed to sbatch.
megalith launch slurm examples/cluster/llama3_70b.yaml --nodes 8 --gpus-per-node 8 --time 24:00:00 --partition gpu "$@"
