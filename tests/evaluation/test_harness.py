"""lm-evaluation-harness with a cache: a local multiple choice in the harness's own format.

Skipped where lm_eval is not installed: pip install 'pod-attention[lm-eval]'.
"""

import json

import pytest
import torch

import pod

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'pod-attention[lm-eval]'")
HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
harness = pytest.importorskip("pod.evaluation.harness")

TASK = """\
task: pod_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""
GENERATE = """\
task: pod_write
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{label}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
"""


@pytest.fixture
def tasks(tmp_path):
    lines = [
        {"text": f"def function_{n}(x):\n    return {n} * x\n" * (4 + n) + f"#get {n}=", "choices": ["4", "72", "x"],
         "label": n % 3}
        for n in range(6)
    ]  # fmt: skip
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("choice", TASK), ("write", GENERATE)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=tmp_path / "lines.jsonl"))
    return tmp_path


def answers(lm, folder, task="pod_choice"):
    """What the model said in each sample, as the harness has it."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, log_samples=True, bootstrap_iters=0)
    return [sample["filtered_resps"] for sample in found["samples"][task]]


def lm_of(model, tokenizer, method=None, **options):
    return harness.PodLM(model, eviction=method, tokenizer=tokenizer, add_bos_token=False, **options)


@pytest.mark.parametrize(
    "method", ["snapkv:window=8", "h2o", "tova", "cascade:sinks=4,stride=16", "streamingllm:sinks=4"]
)
def test_a_budget_for_the_whole_prompt_is_dense_and_a_smaller_one_is_not(model, tokenizer, tasks, method):
    """With a cache that is ignored the second would hold no longer."""
    dense = answers(lm_of(model, tokenizer), tasks)
    assert len(dense) == 6 and all(len(sample) == 3 for sample in dense)
    whole = answers(lm_of(model, tokenizer, f"{method}{',' if ':' in method else ':'}budget=4096"), tasks)
    if method.startswith(("cascade", "streamingllm")):  # strides are other forwards: rounding only
        assert [[one[1] for one in sample] for sample in whole] == [[one[1] for one in sample] for sample in dense]
        for sample, wanted in zip(whole, dense, strict=True):
            assert [one[0] for one in sample] == pytest.approx([one[0] for one in wanted], abs=1e-4)
    else:
        assert whole == dense
    small = answers(lm_of(model, tokenizer, f"{method}{',' if ':' in method else ':'}budget=40"), tasks)
    for sample, wanted in zip(small, dense, strict=True):
        assert max(abs(one[0] - other[0]) for one, other in zip(sample, wanted, strict=True)) > 1e-3


def test_dense_is_what_the_harness_has_itself(model, tokenizer, tasks):
    ours = answers(lm_of(model, tokenizer), tasks)
    theirs = answers(HFLM(model, tokenizer=tokenizer, backend="causal", add_bos_token=False), tasks)
    for sample, wanted in zip(ours, theirs, strict=True):
        assert [one[1] for one in sample] == [one[1] for one in wanted]
        assert [one[0] for one in sample] == pytest.approx([one[0] for one in wanted], abs=1e-4)


def test_the_eviction_is_before_the_scored_tokens(model, tokenizer):
    """By hand: the prompt less its last tokens, then those with the answer."""
    context = tokenizer("def f(x):\n    return x + 1\n" * 8, add_special_tokens=False)["input_ids"]
    continuation = tokenizer("72", add_special_tokens=False)["input_ids"]
    for last in (1, 5):
        lm = lm_of(model, tokenizer, "snapkv:budget=40,window=8", last_tokens=last)
        remembered = []
        lm.cache_hook.add_partial = lambda *said, kept=remembered: kept.append(said)
        requests = [(("a", "b"), context, continuation), (None, context, continuation[:1])]
        (answer, other) = lm._loglikelihood_tokens(requests, disable_tqdm=True)
        cache = pod.PodCache(model.config, eviction=pod.eviction.SnapKV(budget=40, window=8))
        with torch.no_grad():
            model(torch.tensor([context[:-last]]), past_key_values=cache)
            assert int((cache.positions(0) >= 0).sum(-1).max()) == 40
            rest = context[-last:] + continuation[:-1]
            logits = model(torch.tensor([rest]), past_key_values=cache).logits[0, -2:].log_softmax(-1)
        chances = [float(logits[place, token]) for place, token in enumerate(continuation)]
        assert answer[0] == pytest.approx(sum(chances), abs=1e-5) and other[0] == pytest.approx(chances[0], abs=1e-5)
        assert remembered == [("loglikelihood", ("a", "b"), answer)]


def test_a_prompt_beyond_the_positions_loses_its_beginning(model, tokenizer):
    lm = lm_of(model, tokenizer, max_length=20)
    context = list(range(3, 60))
    (cut,) = lm._loglikelihood_tokens([(None, context, [70, 71])], disable_tqdm=True)
    (short,) = lm._loglikelihood_tokens([(None, context[-19:], [70, 71])], disable_tqdm=True)
    assert cut == short


@pytest.mark.parametrize("batch_size", [1, 3])
def test_tasks_that_generate_evict_too(model, tokenizer, tasks, batch_size):
    dense = answers(lm_of(model, tokenizer, batch_size=batch_size), tasks, "pod_write")
    assert answers(lm_of(model, tokenizer, "h2o:budget=4096", batch_size=batch_size), tasks, "pod_write") == dense
    assert answers(lm_of(model, tokenizer, "h2o:budget=24", batch_size=batch_size), tasks, "pod_write") != dense


def test_by_name_on_a_checkpoint(ckpt, tokenizer, tasks):
    from lm_eval.api.registry import get_model

    lm = get_model("pod")(pretrained=str(ckpt), eviction="h2o:budget=40", add_bos_token=False, device="cpu")
    assert len(answers(lm, tasks)) == 6


def test_what_cannot_be_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match="last_tokens must be at least 1, got 0"):
        lm_of(model, tokenizer, last_tokens=0)
    with pytest.raises(ValueError, match="does not say where a question begins: leave query_aware out"):
        lm_of(model, tokenizer, "snapkv:budget=40,window=8,query_aware=false")
    with pytest.raises(ValueError, match="evicts after a prompt, and a text that is scored whole has none"):
        lm_of(model, tokenizer, "h2o:budget=40").loglikelihood_rolling([])
    assert lm_of(model, tokenizer, "streamingllm:budget=40").loglikelihood_rolling([]) == []
