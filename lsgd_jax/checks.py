"""Argument checks for rules and methods of your own."""

from lsgd_jax._src.checks import check_fraction as check_fraction
from lsgd_jax._src.checks import check_not_negative as check_not_negative
from lsgd_jax._src.checks import check_option as check_option
from lsgd_jax._src.checks import check_period as check_period
from lsgd_jax._src.checks import check_positive_int as check_positive_int
