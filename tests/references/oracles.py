"""Slow float64 NumPy versions of the equations, one matrix at a time and free of the package's own code."""

import numpy as np


def newton_schulz(x, rows):
  """Returns X after X <- aX + (bA + cA^2)X, A = X X^T, for each row (a, b, c), from X / |X|_F on the smaller side."""
  x = np.asarray(x, np.float64)
  if x.shape[0] > x.shape[1]:
    return newton_schulz(x.T, rows).T
  x = x / np.linalg.norm(x)
  for a, b, c in rows:
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x


def polar(x):
  """Returns U V^T over the non-zero singular values of X = U S V^T."""
  u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
  kept = s > 1e-6 * s[0]
  return u[:, kept] @ vt[kept]


def power(a, exponent, floor=1e-6):
  """Returns A^p with eigenvalues floored at `floor` times the largest."""
  w, q = np.linalg.eigh(a)
  return q * np.maximum(w, floor * w.max()) ** exponent @ q.T


def kronecker_step(left, right, gradient, decay):
  """Returns b L + (1-b) G G^T and b R + (1-b) G^T G."""
  new_left = decay * left + (1 - decay) * gradient @ gradient.T
  return new_left, decay * right + (1 - decay) * gradient.T @ gradient


def kl_step(left, right, gradient, decay, left_basis, right_basis):
  """Returns the KL factors; a basis is a pair (Q, w) from before this step."""
  m, n = gradient.shape
  (q_left, w_left), (q_right, w_right) = left_basis, right_basis
  inverse_right = q_right * (1 / w_right) @ q_right.T
  inverse_left = q_left * (1 / w_left) @ q_left.T
  new_left = decay * left + (1 - decay) / n * gradient @ inverse_right @ gradient.T
  return new_left, decay * right + (1 - decay) / m * gradient.T @ inverse_left @ gradient


def kronecker_start(gradient):
  """Returns (|G|_F^2 / m) I and (|G|_F^2 / n) I."""
  m, n = gradient.shape
  return np.sum(gradient**2) / m * np.eye(m), np.sum(gradient**2) / n * np.eye(n)


def kl_start(gradient):
  """Returns c I twice, c the RMS of G."""
  m, n = gradient.shape
  c = np.sqrt(np.mean(gradient**2))
  return c * np.eye(m), c * np.eye(n)


def orthogonal_iteration(a, q):
  """Returns QR(A Q) and diag(Q^T A Q), columns in the order of the old ones."""
  q, r = np.linalg.qr(a @ q)
  q = q * np.sign(np.diag(r))
  return q, np.diag(q.T @ a @ q)


def diagonalization(a, q):
  """Returns the eigenvectors of A and its eigenvalues, each vector in the column of the old one that it overlaps most.

  Only for bases that move little in one step: no two new vectors may overlap one old column most.
  """
  w, vectors = np.linalg.eigh(a)
  order = np.argmax(np.abs(q.T @ vectors), axis=1)
  return vectors[:, order], w[order]


def by_magnitude(w):
  """Returns the order of falling power of two of w_max / w, in which the columns within a factor of two stay."""
  return np.argsort(np.floor(np.log2(w.max() / w)), kind='stable')


def blocks_by_magnitude(w, block_size):
  """Returns `by_magnitude` within each block of that size."""
  starts = range(0, len(w), block_size)
  return np.concatenate([start + by_magnitude(w[start : start + block_size]) for start in starts])


def block_diagonal(factor, block_size):
  """Returns the factor without what is outside of its diagonal blocks."""
  block = np.arange(len(factor)) // block_size
  return factor * (block[:, None] == block)


def soap(
  gradients,
  *,
  kl=False,
  refresh=orthogonal_iteration,
  refresh_every=1,
  offset=0,
  b1=0.9,
  b2=0.95,
  decay=0.95,
  block_size=10**9,
  right_block_size=None,
):
  """Returns the update of every step, without learning rate: Adam with eps = 0 in the eigenbasis of the factors.

  A refresh is due at steps 0, refresh_every, ... counted from -offset. Before the first one the bases are the identity
  and the eigenvalues those of a multiple of the identity with the factor's trace.
  """
  right_block_size = right_block_size or block_size
  m, n = gradients[0].shape
  left, right = (kl_start if kl else kronecker_start)(np.asarray(gradients[0], np.float64))
  q_left, q_right = np.eye(m), np.eye(n)
  w_left, w_right = None, None
  mu, nu = np.zeros((m, n)), np.zeros((m, n))
  updates = []
  for step, gradient in enumerate(np.asarray(gradients, np.float64)):
    if kl:
      values = [np.trace(f) / len(f) if w is None else w for f, w in ((left, w_left), (right, w_right))]
      bases = [
        (q, np.full(len(q), w)) if np.ndim(w) == 0 else (q, w) for q, w in zip((q_left, q_right), values, strict=True)
      ]
      left, right = kl_step(left, right, gradient, decay, *bases)
    else:
      left, right = kronecker_step(left, right, gradient, decay)
    left, right = block_diagonal(left, block_size), block_diagonal(right, right_block_size)
    if (step + offset) % refresh_every == 0:
      mu = q_left @ mu @ q_right.T
      q_left, w_left = refresh(left, q_left)
      q_right, w_right = refresh(right, q_right)
      rows, columns = blocks_by_magnitude(w_left, block_size), blocks_by_magnitude(w_right, right_block_size)
      q_left, w_left, q_right, w_right = q_left[:, rows], w_left[rows], q_right[:, columns], w_right[columns]
      mu = q_left.T @ mu @ q_right
      nu = nu[np.ix_(rows, columns)]
    rotated = q_left.T @ gradient @ q_right
    mu = b1 * mu + (1 - b1) * rotated
    nu = b2 * nu + (1 - b2) * rotated**2
    corrected = mu / (1 - b1 ** (step + 1)) / np.sqrt(nu / (1 - b2 ** (step + 1)))
    # What Adam can give at most in one basis (Cauchy-Schwarz); the recipes clip to it.
    bound = (1 - b1) / np.sqrt((1 - b2) * (1 - b1**2 / b2))
    updates.append(q_left @ np.clip(corrected, -bound, bound) @ q_right.T)
  return np.array(updates)


def shampoo(gradients, *, kl=False, momentum=0.9, decay=0.95, rms=0.2):
  """Returns the update of every step, without learning rate: L^e G R^e, averaged and rescaled to RMS `rms`."""
  left, right = (kl_start if kl else kronecker_start)(np.asarray(gradients[0], np.float64))
  average = np.zeros(gradients[0].shape)
  updates = []
  for gradient in np.asarray(gradients, np.float64):
    if kl:
      bases = [np.linalg.eigh(factor)[::-1] for factor in (left, right)]
      left, right = kl_step(left, right, gradient, decay, *bases)
    else:
      left, right = kronecker_step(left, right, gradient, decay)
    exponent = -1 / 2 if kl else -1 / 4
    average = momentum * average + (1 - momentum) * power(left, exponent) @ gradient @ power(right, exponent)
    updates.append(rms * average / np.sqrt(np.mean(average**2)))
  return np.array(updates)
