"""Merge a checkpoint that an Accelerate script saved with `accelerator.save_state` into one file that transformers
loads: python merge_megatron_checkpoint.py --checkpoint-dir checkpoint-1000 --output pytorch_model.bin"""

import argparse
import sys

from megalith.cli.main import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    sys.exit(main(["checkpoint", "merge", args.checkpoint_dir, args.output, "--hf"]))
