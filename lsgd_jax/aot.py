"""Compiles training steps for TPU pods and GPU clusters that are not here.

XLA compiles for a described cluster on any machine. A report has the memory that a step
takes per device, the bytes of every collective, and whether they are hidden behind compute.
"""

from lsgd_jax._src.aot.buffers import Buffer as Buffer
from lsgd_jax._src.aot.chips import Chip as Chip
from lsgd_jax._src.aot.chips import chip as chip
from lsgd_jax._src.aot.collectives import Collective as Collective
from lsgd_jax._src.aot.compiling import report as report
from lsgd_jax._src.aot.compiling import report_of as report_of
from lsgd_jax._src.aot.flops import flops as flops
from lsgd_jax._src.aot.memory import Memory as Memory
from lsgd_jax._src.aot.options import overlap_options as overlap_options
from lsgd_jax._src.aot.planning import Choice as Choice
from lsgd_jax._src.aot.planning import Plan as Plan
from lsgd_jax._src.aot.planning import check_hidden as check_hidden
from lsgd_jax._src.aot.planning import plan as plan
from lsgd_jax._src.aot.pod import Pod as Pod
from lsgd_jax._src.aot.pod import gpu as gpu
from lsgd_jax._src.aot.pod import tpu as tpu
from lsgd_jax._src.aot.report import Comparison as Comparison
from lsgd_jax._src.aot.report import Program as Program
from lsgd_jax._src.aot.report import Report as Report
from lsgd_jax._src.aot.report import Seconds as Seconds
from lsgd_jax._src.aot.report import check_quiet as check_quiet
from lsgd_jax._src.aot.shapes import shapes_of as shapes_of
from lsgd_jax._src.exchange.ahead import Ahead as Ahead
