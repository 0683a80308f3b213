"""Serving PoD models: inside vLLM, and by a small server of one request at a time. docs/SERVE.md.

plugin.py       what vLLM calls at its start: the models are registered, another version of vLLM is refused
checks.py       what of vLLM's settings a PoD model cannot run with, refused by name
models.py       vLLM's own models with PoD's attention in them
attention.py    that attention: where keys and values lie, what a step is told
near_keys.py    the keys that fall out of the window, and when vLLM frees their blocks
server.py       transformers' OpenAI-compatible server with PoD models in it

Only plugin.py and server.py can be imported where vLLM is not.
"""

__all__ = ["plugin", "server"]  # the rest wants vLLM
