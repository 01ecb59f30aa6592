"""Reading and writing of Megatron-LM's checkpoints, without Megatron and without running code from them."""
