"""Post-train a model with shared distant scores.

    python -m pod.fit                                   # lists the recipes
    python -m pod.fit --help                            # every key
    python -m pod.fit recipe=llama3-32k
    python -m pod.fit recipe=tiny trainer.max_steps=20 resume=auto
    python -m pod.fit recipe=mine trainer.strategy=deepspeed trainer.devices=2 trainer.sequence_parallel_size=2
    python -m pod.fit recipe=llama3-32k plan=true gpu=H100 utilisation=0.4    # memory, FLOPs, hours; trains nothing

The run itself is `pod.training.run`, which brings lightning: the lists, the help and the plan do without. It writes
into the run's folder `recipe.yaml`, `blocks.json`, `logs/` and `steps/step=N.ckpt`, `best/`, at the end `summary.md`.
"""

import contextlib
import shlex
import sys

import torch

from pod.extras import require
from pod.recipe.loading import main_recipe
from pod.recipe.schema import output_folder
from pod.terminal import Stopped, exit_status
from pod.training.plan import show_plan


@exit_status
def main(arguments: list[str]) -> int:
    if any(argument.startswith("plan=") for argument in arguments):
        show_plan(arguments)
        return 0
    if not arguments or {"--help", "-h"} & set(arguments):
        main_recipe(arguments, "pod.fit")  # prints, and ends here
    require("train", "lightning", "torchdata", "torchmetrics", "matplotlib", what="pod.fit")
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from pod.analyze import analyze  # forwards of the base model, which a plan and a list do without
    from pod.training.run import fit

    # Of several processes only the first one speaks.
    with contextlib.redirect_stdout(sys.stdout if rank_zero_only.rank == 0 else None):
        recipe = main_recipe(arguments, "pod.fit")
    torch.set_float32_matmul_precision("high")
    try:
        fit(recipe, analyze)
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    except Stopped as stopped:
        if rank_zero_only.rank == 0:
            again = [argument for argument in arguments if not argument.startswith("resume=")]
            print(f"{stopped}; go on with: python -m pod.fit {shlex.join(again)} resume=auto", flush=True)
        return stopped.code
    if rank_zero_only.rank == 0:
        out = output_folder(recipe)
        print(f"written: {out}; next: python -m pod.export --ckpt {out} --out exports/{out.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
