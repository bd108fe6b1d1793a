"""Checks of the arguments of your own rules and methods, and of workers that must agree."""

from lsgd_jax._src.checks import check_fraction as check_fraction
from lsgd_jax._src.checks import check_not_negative as check_not_negative
from lsgd_jax._src.checks import check_option as check_option
from lsgd_jax._src.checks import check_period as check_period
from lsgd_jax._src.checks import check_positive_int as check_positive_int
from lsgd_jax._src.workers.consensus import check_workers_agree as check_workers_agree
