"""Built-in rewards (`rl.reward_funcs`), one file each, listed in config/extensions.py.

A reward is a function of a completion's text, its prompt, its token ids and the maximum number of tokens.
"""
