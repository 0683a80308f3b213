"""Training: the LightningModule and what it is given.

run.py          fit: a recipe checked, and given to Lightning's Trainer
module.py       PodModule: one step of learning
loss.py         next-token loss, and a teacher's, in chunks of the sequence
data.py         PodDataModule: batches, and the position that a resumed run goes on from
strategy.py     UlyssesDeepSpeedStrategy: ZeRO and sequence-parallel groups under Lightning
checkpoints.py  a run's checkpoints: written whole, found again
summary.py      what a run did: a table, a picture, pictures for its logger
adapters.py     adapters by peft, merged at export
head_gates.py   learn(): how much each KV head needs the distant past, as DuoAttention learns it
base_model.py   the stock model or config that training begins with
plan.py         plan=true: memory, FLOPs, hours of a recipe on a kind of GPU
"""
