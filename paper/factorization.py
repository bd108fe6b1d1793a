r"""Low-rank matrix completion with every entry known: F(X) = ¼‖XXᵀ − UUᵀ‖², exactly.

U and X are [d, r]. No d × d matrix is formed. The obvious trace formula,

.. math:: 4 F = \|X^T X\|^2 - 2 \|U^T X\|^2 + \|U^T U\|^2,

subtracts numbers of size d²r: in float64 it has no correct digit where F is below about
1e-6. The QR factorization of [U, X], computed by blocks, has no such cancellation. With
U = QR and

.. math::
  A = Q^T X, \qquad P = X - Q A = Q_\perp B

(the part of X in the column space of U, and the rest), [U, X] = [Q, Q_⊥] T with
T = [[R, A], [0, B]] and
:math:`X X^T - U U^T = [Q, Q_\perp] \, T \, \mathrm{diag}(-I, I) \, T^T [Q, Q_\perp]^T`.
The orthonormal outer factors do not change the norm, so

.. math::
  4 F = \left\| \begin{matrix} A A^T - K & A B^T \\ B A^T & B B^T \end{matrix} \right\|^2
      = \|A A^T - K\|^2 + 2 \, \mathrm{tr}(A G A^T) + \|G\|^2,

where K = RRᵀ and G = BᵀB = PᵀP. All terms are sums of squares, each of them small near a
solution. B itself is never needed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Problem(NamedTuple):
    """The matrix U in the form that `loss_and_grad` uses.

    Attributes:
      basis: Q [..., d, r], an orthonormal basis of the column space of U.
      gram: K = RRᵀ [..., r, r], so that UUᵀ = Q K Qᵀ.
    """

    basis: np.ndarray
    gram: np.ndarray


def problem_of(u: np.ndarray) -> Problem:
    """Returns the problem of finding X with XXᵀ = UUᵀ, for U [..., d, r] of float64."""
    basis, r = np.linalg.qr(u)
    return Problem(basis, r @ r.swapaxes(-1, -2))


def loss_and_grad(x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    r"""F and its gradient (XXᵀ − UUᵀ)X = X(XᵀX) − U(UᵀX), in O(dr²).

    In the notation of the module, XᵀX = AᵀA + G and U(UᵀX) = Q(KA).

    Args:
      x: X, float64 [d, r].
      problem: U, from `problem_of`.

    Returns:
      (F, gradient): a scalar and a matrix like X.

    >>> problem = problem_of(np.array([[3.0], [4.0]]))
    >>> loss, grad = loss_and_grad(jnp.array([[5.0], [0.0]]), problem)
    >>> float(loss), grad.tolist()
    (200.0, [[80.0], [-60.0]])
    """
    q, k = problem
    a = q.T @ x
    p = x - q @ a
    g = p.T @ p

    def squares(m):
        return jnp.square(m).sum()

    loss = (squares(a @ a.T - k) + 2 * jnp.sum((a @ g) * a) + squares(g)) / 4
    return loss, x @ (a.T @ a + g) - q @ (k @ a)
