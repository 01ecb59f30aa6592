"""`torchrun … -m megalith.dialects.megatron FLAGS` trains as Megatron's pretrain_gpt.py would."""

import sys

from megalith.dialects.megatron.door import main

if __name__ == "__main__":
    sys.exit(main())
