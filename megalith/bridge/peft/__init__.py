"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, with transformers' module names.

If the family has separate matrices for queries, keys and values (or gate and up), each pair A, B of a Megalith linear
is PEFT's adapter of one module. If the family fuses them, PEFT has one pair for all rows, which is Megalith's pair
`whole`. The rows of B are in the order of the family's weights. The other two cases are exact as well:

    Megalith has parts, PEFT one module       A: the parts' A stacked; B: a block of columns per part, zero in the rows
                                              of the others; rank: the sum
    Megalith has `whole`, PEFT separate ones  A: the same for each module; B: split by rows

All experts of a layer are one parameter in transformers. PEFT adapts it as one of its `target_parameters`, with A
[experts · rank, in] and B [out, rank · experts].
"""
