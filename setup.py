"""What pyproject.toml cannot say: the wheel brings the recipes of `recipes/`, as `pod/recipe/shipped/`.

An editable install copies nothing: the clone's own are read.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "pod", "recipe", "shipped")
            self.mkpath(str(folder))
            for recipe in sorted(Path(__file__).parent.glob("recipes/*.yaml")):
                self.copy_file(str(recipe), str(folder / recipe.name))


setup(cmdclass={"build_py": BuildWithRecipes})
