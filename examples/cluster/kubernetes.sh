#!/bin/sh
# Prints the Kubernetes manifests of llama3_70b.yaml on eight machines; with --submit they are handed to kubectl.
megalith launch kubernetes examples/cluster/llama3_70b.yaml --nodes 8 --gpus-per-node 8 --image registry/megalith:1 --volume training:/data "$@"
