"""The one cache: what a model keeps of its tokens.

cache.py            `PodCache`, a transformers `Cache`: checks a forward, counts, and hands it to a storage
storage.py          what a cache counts of its rows, what one forward adds, and what a storage is asked; there are two
slots.py            the first: slots, whether tokens are evicted by scores or all kept
layer.py            what it stores of one layer: own keys of proximal tokens, the table of positions
offload.py          values in CPU memory, and a pool of those that were read last
streams.py          keys and values of heads that stream
fork.py             rows over one context, which is stored once, and slots of each row's own
keep.py             which tokens stay, by what a method of `pod.eviction` says
chain.py            the second: sinks and a chain of sub-caches, which rotates keys to their place
chain_step.py       what one forward adds to it, and where its keys of proximal tokens are
row_runs.py         the same where rows have other budgets
file.py             a cache as a file
"""

from pod.cache.cache import PodCache

__all__ = ["PodCache"]
