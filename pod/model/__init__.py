"""A PoD model: the families, one decoder layer for all of them, what a call may ask.

inputs.py             padding and packed documents read off a call; what is refused
placement.py          a model on several devices: device maps that cut no block
offload.py            activations kept in the CPU's memory
decoder.py            attention with running anchors and layer of all families; stack and causal LM, mixed into theirs
families.py           the families: each one's config and classes; convert
adapter.py            a model by name, with an adapter on top: load
graph.py              one CUDA graph for the decode steps of a generate call
probe.py              a running model's attention layers, watched sample by sample
speculation.py        self-speculation: drafts on the same cache by a sparse read
reconstruction.py     KVzip's second look at a context: reconstruct
gguf.py               GGUF files as Hugging Face folders, in the user's cache
weights.py            all of a model's weights loaded, or refused by name; what tells them from others
sequence_parallel.py  the exchange around attention: whole sequences of a rank's own heads
shape.py              a model's sizes from its config: parameters, FLOPs
trial.py              one way to run attention, checked and timed in a process of its own
memory.py             what a training step and generating take of a GPU, by kind; the longest sample, the largest batch
"""

from pod.model import families as families  # whoever imports a config of ours wants the Auto classes to know its model
