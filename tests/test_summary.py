"""What a run did, told when it ends: from the logs of all its parts, to every kind of logger."""

from types import SimpleNamespace

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from pod.training.summary import Summary, draw, read_metrics, series, table

FIRST = """epoch,gate/layer_0,gate/layer_1,step,train_loss,val_loss,val_passkey
0,,,0,4.0,,
0,,,1,3.0,,
0,0.5,0.75,1,,3.5,0.25
0,,,2,9.0,,
"""
# The run was killed after step 2 and went on from step 1, twice.
SECOND = """epoch,gate/layer_0,gate/layer_1,step,train_loss,val_loss,val_passkey
0,,,2,2.0,,
0,,,3,1.5,,
0,0.25,0.5,3,,1.75,0.5
"""


@pytest.fixture
def run(tmp_path):
    for version, text in {0: FIRST, 10: SECOND, 2: FIRST.replace("9.0", "8.0")}.items():
        folder = tmp_path / f"logs/version_{version}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(text)
    return tmp_path


def test_the_last_word_on_each_step(run):
    rows = read_metrics(run)
    assert series(rows, "train_loss") == ([0, 1, 2, 3], [4.0, 3.0, 2.0, 1.5])
    assert series(rows, "gate/layer_1") == ([1, 3], [0.75, 0.5])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(rows).splitlines()[2:]]
    assert lines == [
        ["loss", "2.625", "2.625", "1.5", "4"],
        ["validation loss", "2.625", "2.625", "1.75", "2"],
        ["validation answers that are right", "0.375", "0.375", "0.5", "2"],
    ]


def test_a_log_that_a_kill_or_a_full_disk_cut_off(run, capsys):
    """What is cut off is no number of the run's, and a damaged line does not end a run that is done otherwise."""
    wanted = read_metrics(run)
    log = run / "logs/version_2/metrics.csv"
    log.write_bytes(log.read_bytes() + b"0,,,x3,0.5,,\n0,,,inf,0.5,,\n0,,,4,0.1\xff")
    assert read_metrics(run) == wanted
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(f"{log}: a damaged line is left out" in line for line in said)


def test_means_are_of_five(tmp_path):
    folder = tmp_path / "logs/version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step,train_loss\n" + "".join(f"{step},{step}\n" for step in range(1, 21)))
    assert [cell.strip() for cell in table(read_metrics(tmp_path)).splitlines()[2].split("|")][2:5] == ["3", "18", "1"]


def test_pictures_go_to_the_loggers_that_show_them(run, capsys):
    (run / "blocks.png").write_bytes(b"")
    draw(read_metrics(run), run / "similarity.png")
    (run / "blocks.png").write_bytes((run / "similarity.png").read_bytes())
    seen = []

    class Wandb(WandbLogger):
        def __init__(self):
            pass

        def log_image(self, key, images):
            seen.append(("wandb", key, images[0]))

        def save(self):
            pass

    class Board(TensorBoardLogger):
        def __init__(self):
            pass

        def save(self):
            pass

        @property
        def experiment(self):
            def add_image(name, image, step, dataformats):
                assert isinstance(image, np.ndarray) and image.ndim == 3 and dataformats == "HWC"
                seen.append(("board", name, step))

            return SimpleNamespace(add_image=add_image)

    trainer = SimpleNamespace(loggers=[CSVLogger(run), Wandb(), Board()], global_step=4)
    summary = Summary(run)
    summary.on_train_start(trainer, None)
    summary.on_fit_end(trainer, None)
    assert [(kind, name) for kind, name, _ in seen] == [
        (kind, name) for name in ("similarity", "blocks", "summary") for kind in ("wandb", "board")
    ]
    assert {step for kind, _, step in seen if kind == "board"} == {4}
    assert "| loss" in capsys.readouterr().out
    assert (run / "summary.md").read_text().startswith(f"# {run.name}: 4 steps\n")


def test_nothing_is_said_of_no_step(tmp_path, capsys):
    Summary(tmp_path).on_fit_end(SimpleNamespace(loggers=[], global_step=0), None)
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out
