#!/bin/bash
# Regenerates the job files of this folder; tests/launch/test_cluster_files.py checks that they are current.
set -eu
cd "$(dirname "$0")/.."
megalith launch slurm deploy/run.yaml --nodes 2 --name llama3-8b --time 24:00:00 --partition gpu --cpus 96 \
    --before 'preprocess --input /data/corpus.jsonl --output-prefix /data/corpus --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer.json --append-eod --workers 32' \
    --after 'export-hf /data/runs/llama3-8b /data/llama3-8b-hf' --write deploy/slurm
for kind in trainjob pytorchjob jobset; do
    megalith launch kubernetes deploy/run.yaml --nodes 2 --name llama3-8b --kind "$kind" --image megalith:latest \
        --volume training:/data --cpus 96 --memory 900Gi --efa 32 --queue training \
        --topology topology.kubernetes.io/zone \
        --before 'preprocess --input /data/corpus.jsonl --output-prefix /data/corpus --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer.json --append-eod --workers 32' \
        --after 'export-hf /data/runs/llama3-8b /data/llama3-8b-hf' --write "deploy/$kind"
done
