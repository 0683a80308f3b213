"""Everything that imports triton. Nothing here is imported before `pod_kernels.dispatch` has said that it runs.

reading.py             how vectors in segments and in other tensors are read
softmax.py             a step of the online softmax
fused.py               shared-score attention as one operation over two sources of logits: launches
fused_tiles.py         which tiles are visited, which need a mask, how one is read
fused_forward.py       the forward kernel
fused_backward.py      the backward kernels, of queries and of keys
splits.py              one query's attention split among programs, and the merge
decode.py              that of one query in each row over segments; early skip
slot_decode.py         the same over fixed slots
block_tables.py        attention of requests whose cache lies in blocks: decoding and chunks of a prefill
column_sums.py         what each key receives from a chunk or from a prefill's last queries
update.py              a decoded token into all heads of a layer
cascade.py             a decoded token's place in a cascade, and the scores
"""
