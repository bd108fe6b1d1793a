"""The named experiments in the folder `configs` beside this package.

`import configs` would take a package of this name in the current folder.
"""

import pathlib


__path__ = [str(pathlib.Path(__file__).parents[1] / "configs")]
