"""Methods that keep a part of the cache."""

from pod.eviction.cascade import Cascade
from pod.eviction.storage import StoragePolicy, Store
from pod.eviction.streaming import StreamingLLM

__all__ = ["Cascade", "StoragePolicy", "Store", "StreamingLLM"]
