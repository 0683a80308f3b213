"""Text and tokenised shards in, prepared samples of one length out.

sources.py        reads and tokenises what pod.prepare is given
hub.py            data sets of the hub, streamed part by part
mds.py            reads MosaicML MDS shards (ProLong)
chat.py           conversations by a chat template, and which tokens carry loss
sampling.py       which documents are drawn, and which tokens lie in which sample
sample_writer.py  writes it, shard by shard
prepared.py       the format of prepared data: memory-mapped samples of one length
summary.py        how long the documents are: report.md, report.png
demo_corpus.py    the demo's corpus: the standard library with key lines planted; its held-out text
tokenizer.py      the tokenizer that a run names, and whether data were prepared with it
"""
