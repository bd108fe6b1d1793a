"""Methods of single recent papers, without confirmation by others yet."""

from lsgd_jax._src.contrib.desloc import desloc as desloc
from lsgd_jax._src.contrib.grawa import GradientNormState as GradientNormState
from lsgd_jax._src.contrib.grawa import gradient_weighted as gradient_weighted
from lsgd_jax._src.contrib.grawa import grawa as grawa
from lsgd_jax._src.contrib.noloco import NoLoCoState as NoLoCoState
from lsgd_jax._src.contrib.noloco import noloco as noloco
from lsgd_jax._src.contrib.palsgd import palsgd as palsgd
from lsgd_jax._src.contrib.sparse_diloco import sparse_diloco as sparse_diloco
from lsgd_jax._src.contrib.sparta import sparta as sparta
from lsgd_jax._src.methods.pairwise import SumWeightState as SumWeightState
from lsgd_jax._src.methods.pairwise import gosgd as gosgd
