"""What fit, export and perplexity say of tokenizers: one that is not there, and data that another one prepared."""

import json
import re
from functools import partial

import numpy as np
import pytest
from scripts import save, script, tiny_llama
from test_fit import CONFIG, recipe_file
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from pod.analyze import analyze
from pod.data.sample_writer import SampleWriter
from pod.export import export
from pod.recipe.loading import load_recipe
from pod.training import run as training_run
from pod.training.run import check_data

fit = partial(training_run.fit, analyze=analyze)


def write(path, tokenizer="bytes", vocab_size=259):
    tokens = np.random.default_rng(0).integers(3, 250, (8, 128))
    tokens[:, 0] = vocab_size - 1
    with SampleWriter(path, sequence_length=128, vocab_size=vocab_size, tokenizer=str(tokenizer)) as writer:
        writer.add("train", tokens)
        writer.add("validation", tokens[:2])
    return path


def words(path, *names):
    """A tokenizer of whole words, saved."""
    inner = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=names[0]))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=names[0]).save_pretrained(path)
    return path


class Opened:
    """As much of a data module as is looked at."""

    def __init__(self, data, validation=None):
        from pod.data.prepared import PreparedData

        self.prepared = PreparedData(data)
        self.validation = None if validation is None else PreparedData(validation)


def said(recipe, capsys, *data):
    check_data(recipe, Opened(*data))
    return capsys.readouterr().err


def test_ids_that_the_model_has_not_are_refused(tmp_path):
    """In training data and in those to validate on; before anything is written."""
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", vocab_size=300)
    path = recipe_file(tmp_path, good)
    message = "bad was prepared with the tokenizer 'bytes' of 300 ids, but the model has 259: prepare again with"
    for wrong in (f"data.path={bad}", f"data.validation_path={bad}"):
        with pytest.raises(ValueError, match=message):
            fit(load_recipe([f"recipe={path}", wrong]))
    assert not (tmp_path / "run").exists()


def test_the_analysis_refuses_them_too(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    path = recipe_file(tmp_path, write(tmp_path / "bad", vocab_size=300), base=tmp_path / "base")
    with pytest.raises(ValueError, match="of 300 ids, but the model has 259"):
        analyze(load_recipe([f"recipe={path}"]))


def test_data_of_another_tokenizer_is_warned_of_once(tmp_path, capsys):
    names = ["?", "one", "two", "three"]
    first, other = words(tmp_path / "first", *names), words(tmp_path / "other", "?", "one", "drei", "zwei")
    longer = words(tmp_path / "longer", *names, "four")
    recipe = load_recipe([f"recipe={recipe_file(tmp_path, write(tmp_path / 'a', first))}", f"model.tokenizer={first}"])
    assert said(recipe, capsys, tmp_path / "a") == ""
    first.rename(tmp_path / "moved")
    recipe.model.tokenizer = str(tmp_path / "moved")
    text = said(recipe, capsys, tmp_path / "a")
    assert text.count("warning") == 1 and f"tokenizer '{first}', the model's is" in text
    assert "cannot be compared (no tokenizer can be loaded from" in text
    words(first, *names)
    assert said(recipe, capsys, tmp_path / "a") == "", "another place, the same tokens"
    recipe.model.tokenizer = str(longer)
    assert said(recipe, capsys, tmp_path / "a") == "", "more tokens, none of them another one"
    recipe.model.tokenizer = str(other)
    text = said(recipe, capsys, tmp_path / "a", write(tmp_path / "b", first))
    assert text.count("warning") == 1 and "and 2 of 4 ids are other tokens (id 2: 'two', 'drei')" in text
    assert "prepare again" in text


def test_the_bases_tokenizer_is_compared_if_it_has_one(tmp_path, capsys):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    recipe = load_recipe([f"recipe={recipe_file(tmp_path, write(tmp_path / 'a'), base)}", "model.tokenizer=null"])
    assert said(recipe, capsys, tmp_path / "a") == ""
    ByT5Tokenizer(extra_ids=0).save_pretrained(base)
    assert said(recipe, capsys, tmp_path / "a") == ""
    words(tmp_path / "base", "?", "one")
    assert "'bytes', the model's is" in said(recipe, capsys, tmp_path / "a")


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    data, gone = write(tmp_path / "data"), tmp_path / "gone"
    line = [f"recipe={recipe_file(tmp_path, data)}", "trainer.max_steps=1", "trainer.validate_every=2"]
    with pytest.raises(ValueError, match=f"model.tokenizer={gone}: no tokenizer can be loaded from '{gone}'"):
        fit(load_recipe([*line, f"model.tokenizer={gone}"]))
    assert not (tmp_path / "run").exists()

    ByT5Tokenizer(extra_ids=0).save_pretrained(gone)
    fit(load_recipe([*line, f"model.tokenizer={gone}"]))
    gone.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"model.tokenizer={gone} in .*recipe.yaml: no tokenizer can be loaded"):
        export(tmp_path / "run", tmp_path / "export")
    assert not (tmp_path / "export").exists()
    (tmp_path / "elsewhere").rename(gone)
    assert (export(tmp_path / "run", tmp_path / "export") / "tokenizer_config.json").exists()


def test_perplexity_refuses_data_of_another_tokenizer(tmp_path, capsys):
    """Ids that are not in the data do not matter."""
    perplexity, names = script("eval/perplexity.py"), [f"word {index}" for index in range(259)]
    model = save(tiny_llama(), tmp_path / "model")

    def measured(data, *renamed):
        capsys.readouterr()
        words(model, *(f"{name} anew" if index in renamed else name for index, name in enumerate(names)))
        code = perplexity.main(
            ["--ckpt", str(model), "--data", str(data), "--limit", "2", "--out", str(tmp_path / "out")]
        )
        return code, capsys.readouterr().err

    code, said = measured(write(tmp_path / "bytes"))
    assert code == 2 and not (tmp_path / "out" / "perplexity.json").exists()
    assert f"{tmp_path / 'bytes'} was prepared with the tokenizer 'bytes', the model's is '{model}'" in said
    assert re.search(r"and (\d+) of \1 ids in it are other tokens \(id (\d+): '.+', 'word \2'\): prepare again", said)
    theirs = write(tmp_path / "words", words(tmp_path / "tokenizer", *names))
    assert measured(theirs)[0] == 0
    code, said = measured(theirs, 1, 2)
    assert code == 0 and "warning" not in said
    code, said = measured(theirs, 1, 2, 258)
    assert code == 2 and "ids in it are other tokens (id 258: 'word 258', 'word 258 anew')" in said
    code, said = measured(write(tmp_path / "more", vocab_size=300))
    assert code == 2 and "of 300 ids, but the model has 259: prepare again with" in said
    (tmp_path / "tokenizer").rename(tmp_path / "gone")
    code, said = measured(theirs)
    assert code == 0 and "which cannot be compared (no tokenizer can be loaded from" in said
